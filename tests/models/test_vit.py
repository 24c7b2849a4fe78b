"""Vision transformers and ConvNeXt against timm's own definitions, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from test_models import arrays, assert_gradients, assert_near

from fedjax_bn import models
from fedjax_bn.models import pretrained
from fedjax_bn.models.torch_weights import from_torch, to_torch, torch_name

torch = pytest.importorskip("torch")
timm = pytest.importorskip("timm")
VIT = {"width": 12, "depth": 2, "heads": 3, "patch": 4, "image_size": 16}
DEPTHS = (1, 2, 1, 1)


def timms_vit(classes=5, **fields):
    fields = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3} | fields
    network = timm.models.vision_transformer.VisionTransformer
    return network(num_classes=classes, dynamic_img_size=True, **fields)


def timms_convnext(classes=5):
    return timm.models.convnext.ConvNeXt(depths=DEPTHS, dims=(4, 8, 16, 32), num_classes=classes)


# name -> (our network, timm's, sides of the images)
SMALL = {
    "vit": (models.ViTS16(5, **VIT), timms_vit, (16, 16)),
    "dinov2": (models.DINOv2S14(5, **VIT), lambda: timms_vit(init_values=1e-5), (20, 12)),
    "convnext": (models.ConvNeXtT(5, width=4, depths=DEPTHS), timms_convnext, (35, 32)),
}


def drawn(network):
    """A network of timm in float64 whose every tensor is random."""
    torch.manual_seed(0)
    network = network.double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "differentiated"),
    [
        ("dinov2", False),
        pytest.param("dinov2", True, marks=pytest.mark.slow),
        ("convnext", False),
        pytest.param("vit", True, marks=pytest.mark.slow),
        pytest.param("convnext", True, marks=pytest.mark.slow),
    ],
)
def test_features_logits_and_gradients_equal_timms(name, differentiated, monkeypatch):
    # timm resizes positions in float32.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model, make, sides = SMALL[name]
    network = drawn(make())
    theirs = torch.randn(2, 3, *sides, dtype=torch.float64, requires_grad=True)
    images = jnp.asarray(theirs.detach().movedim(1, -1).numpy())
    variables = from_torch(model, arrays(network))

    def both(variables, images):
        features = model.apply(variables, images, method="features")
        logits = model.apply(variables, features, method="classify")
        return jnp.sin(logits).sum(), (features, logits)

    step = jax.value_and_grad(both, (0, 1), has_aux=True) if differentiated else both
    found = jax.jit(step)(variables, images)
    features, logits = found[0][1] if differentiated else found[1]
    last = network.forward_head(network.forward_features(theirs), pre_logits=True)
    expected = network(theirs)
    assert_near(features, last.detach())
    assert_near(logits, expected.detach())
    if not differentiated:
        return
    slopes, by_image = found[1]
    torch.sin(expected).sum().backward()
    assert_near(by_image, theirs.grad.movedim(1, -1))
    expected = {name: tensor.grad.numpy() for name, tensor in network.named_parameters()}
    assert_gradients(slopes, from_torch(model, expected))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (models.ViTS16, "vit_small_patch16_224"),
        (models.ViTB16, "vit_base_patch16_224"),
        (models.ConvNeXtT, "convnext_tiny"),
        (models.DINOv2S14, "vit_small_patch14_dinov2"),
    ],
)
def test_names_and_shapes_are_timms(ours, theirs):
    with torch.device("meta"):
        network = timm.create_model(theirs, num_classes=1000)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    model = ours(1000)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    sizes = {torch_name(model, path): leaf.size for path, leaf in flatten_dict(shapes).items()}
    assert sizes == {name: np.prod(shape) for name, shape in expected.items()}


def test_weights_go_to_timm_and_back_and_a_file_without_a_classifier_leaves_it_fresh(write):
    for name, (model, make, _) in SMALL.items():
        state = arrays(drawn(make()).float())
        returned = to_torch(model, from_torch(model, state))
        assert returned.keys() == state.keys()
        for key, tensor in state.items():
            np.testing.assert_array_equal(returned[key], tensor, err_msg=f"{name} {key}")
    model, state = SMALL["dinov2"][0], arrays(drawn(timms_vit(0, init_values=1.0)).float())
    images = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    before = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    path = write(state | {"mask_token": np.zeros((1, 12), np.float32)})
    variables, notes = pretrained.load_pretrained(path, model, before)
    assert not np.any(variables["params"]["head"]["kernel"])
    np.testing.assert_array_equal(variables["params"]["pos_embed"], state["pos_embed"])
    assert "the classifier starts fresh" in notes[1]
    more = before["params"] | {"pos_embed": jnp.zeros((1, 26, 12))}
    with pytest.raises(ValueError, match=r"pos_embed.*image_size"):
        pretrained.load_pretrained(path, model, {"params": more})


def test_sides_that_patches_do_not_fill_and_other_norms_are_refused():
    images = jax.ShapeDtypeStruct((1, 18, 16, 3), jnp.float32)
    for fields, words in (
        ({}, "4 divides"),
        ({"norm": "group"}, "norm='group'"),
        ({"heads": 5}, "heads=5"),
        ({"patch": 5}, "patch=5"),
    ):
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(models.ViTS16(**VIT | fields).init, jax.random.key(0), images)
