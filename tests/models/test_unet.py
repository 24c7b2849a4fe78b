"""UNet against a definition in PyTorch, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import arrays, assert_gradients, assert_near, torch_and_jax

from fedjax_bn import models
from fedjax_bn.models.torch_weights import from_torch, to_torch

torch = pytest.importorskip("torch")
SHAPE = (16, 24, 3)


def pair(levels=2, width=4):
    """PyTorch's network and images, our model, its variables and images."""
    model = models.UNet(3, width=width, levels=levels)
    network, theirs, variables, images = torch_and_jax(
        lambda t: t.UNet(3, width, levels), model, SHAPE, batch=2
    )
    return network, theirs, model, variables, images


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("levels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_outputs_gradients_and_running_statistics_equal_pytorchs(levels):
    network, theirs, model, variables, images = pair(levels)

    @jax.jit
    def both(params):
        def loss(params):
            given = variables | {"params": params}
            logits, moved = model.apply(given, images, mutable=["batch_stats"])
            return jnp.sin(logits).sum(), (logits, moved["batch_stats"])

        served = model.apply(variables | {"params": params}, images)
        return served, jax.value_and_grad(loss, has_aux=True)(params)

    served, ((_, (ours, moved)), gradients) = both(variables["params"])
    assert_near(served, channels_last(network.eval()(theirs)[1]))
    logits = network.train()(theirs)[1]
    assert_near(ours, channels_last(logits))
    jax.tree.map(assert_near, moved, from_torch(model, arrays(network))["batch_stats"])
    torch.sin(logits).sum().backward()
    slopes = {name: tensor.grad.numpy() for name, tensor in network.named_parameters()}
    assert_gradients(gradients, from_torch(model, arrays(network) | slopes)["params"])


def channels_last(tensor):
    return tensor.detach().movedim(1, -1).numpy()


def test_the_state_dict_goes_to_pytorch_and_back():
    network, _, model, variables, _ = pair()
    state = to_torch(model, variables)
    assert set(state) == set(network.state_dict())
    for name, tensor in arrays(network).items():
        np.testing.assert_allclose(state[name], tensor, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(1, 18, 16, 3), (2, 16, 3)])
def test_sides_that_cannot_be_halved_are_refused_in_a_sentence(shape):
    with pytest.raises(ValueError, match="4 divides"):
        jax.eval_shape(models.UNet(levels=2).init, jax.random.key(0), jnp.zeros(shape))
