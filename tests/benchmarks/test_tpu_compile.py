"""The benchmark of programs for a TPU: what is read of them, the operations; without libtpu."""

from pathlib import Path

import pytest

# What libtpu 0.0.42.1 made of this for v5e:2x2, less what is not read:
#     def step(w, x):
#         y = x @ w
#         long, short = lambda w: jnp.tanh(w @ w) @ w, lambda w: w @ w
#         return jax.lax.cond(y[0, 0] > 0, short, long, w), y.sum()
#     def clients(w, x):  # on each of four devices: f32[256, 256], f32[2, 3, 128, 256]
#         w, losses = jax.lax.map(lambda x: jax.lax.scan(step, w, x), x)
#         return jax.lax.psum((w.sum(0), losses.sum()), "clients")
TEXT = (Path(__file__).parents[1] / "support" / "tpu_program.txt").read_text()
STEP = 384 + 1833 + max(3426, 2845)  # a product, a slice, the longer branch


@pytest.fixture
def scheduled():
    from on_tpu import scheduled

    return scheduled


def test_cycles_and_collectives_agree_with_a_sum_by_hand(scheduled):
    program = scheduled.parse(TEXT)
    client = 3087 + 32 + 3 * STEP + 2381  # takes its batches, copies the start, keeps its result
    assert scheduled.cycles(program) == 5158 + 2 * client + 1826 + 3980
    assert scheduled.cycles_of_a_step(program, 3) == 2 * STEP  # of both clients
    assert scheduled.collectives(program) == {"all-reduce": (1, 4 * 256 * 256 + 4)}
    groups = dict(scheduled.where(program))
    assert sum(groups.values()) == scheduled.cycles(program)
    assert groups["cond/branch_0_fun/dot_general"] == 2 * 3 * 3426
    assert groups["copy: copy"] == 2 * 32


def made(head, *lines):
    """The text of a computation."""
    return "\n".join((f"{head} (x: s32[]) -> s32[] {{", *(f"  {line}" for line in lines), "}\n"))


def estimated(line, cycles):
    return f'{line}, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


def test_calls_count_and_fusions_count_themselves_alone(scheduled):
    body = made("%body", estimated("%a = s32[] add(%x, %x)", 10))
    known = 'backend_config={"known_trip_count":{"n":"7"}}'
    lines = {
        "%b = s32[] call(%a), to_apply=%body": 10,
        "%c = ((s32[]), s32[], u32[]) async-start(%a), calls=%body": 10,
        estimated("%d = s32[] async-start(%a), calls=%body", 11): 11,
        estimated("%e = s32[] fusion(%a), kind=kLoop, calls=%body", 3): 3,
        "%f = s32[] fusion(%a), kind=kCustom, calls=%body": 0,
        f"%g = s32[] while(%a), condition=%ask, body=%body, {known}": 70,
        "%h = s32[] while(%a), condition=%ask, body=%body": 10,  # it is not known for how long
        "%i = s32[] conditional(%p, %a, %a), true_computation=%body, false_computation=%ask": 10,
        "%j = s32[] async-done(%c)": 0,
    }
    ask = made("%ask", "%n = pred[] not(%x)")
    for line, count in lines.items():
        assert scheduled.cycles(scheduled.parse(body + ask + made("ENTRY %m", line))) == count
    with pytest.raises(ValueError, match="ENTRY"):
        scheduled.parse(body)


def test_collectives_count_once_each_time_they_are_performed_wherever_they_are(scheduled):
    array = "%x = (bf16[2,3]{1,0:T(8,128)}, pred[5]) parameter(0)"  # 12 and 5 bytes
    loop = "%w = s32[] while(%x), condition=%three, body=%turn"
    program = scheduled.parse(
        made("%three", "%c = s32[]{:T(128)} constant(3)")
        + made(
            "%turn", "%y = f32[8] parameter(0)", "%s = f32[2] reduce-scatter(%y), dimensions={0}"
        )
        + made("%fused", "%z = f32[4] parameter(0)", "ROOT %r = f32[4] all-reduce(%z), to_apply=%a")
        + made(
            "ENTRY %main",
            array,
            loop,
            "%g = (bf16[2,3], bf16[8,3]) all-gather-start(%x), dimensions={0}",
            "%h = bf16[8,3] all-gather-done(%g)",
            "%f = f32[4] fusion(%x), kind=kCustom, calls=%fused",
        )
    )
    assert scheduled.collectives(program) == {
        "reduce-scatter": (3, 3 * 32),
        "all-gather": (1, 17),
        "all-reduce": (1, 16),
    }


def test_the_operations_of_a_round_and_of_its_products_are_those_of_the_networks_definition():
    import tasks
    from on_accelerator import flops
    from on_tpu import compiling
    from on_tpu.cases import Case

    samples = 5 * 4 * 32  # clients, steps, a batch
    first = 2 * 28 * 28 * 64 * 5 * 5 * 3  # nothing needs the gradient of the images
    by_hand = samples * (3e9 * tasks.DIGITS.gigaflops - first)
    case = Case("DigitCNN", "fedbn", "auto", "bfloat16", 4)  # padding to 8 clients adds nothing
    assert compiling.operations(case) == pytest.approx(by_hand, rel=2e-3)
    products = compiling.products_of_a_step(case)
    step = sum(map(flops.of_equation, products))
    assert 5 * 4 * step == pytest.approx(by_hand, rel=2e-3)
    # Three convolutions and three dense layers forward, and their gradients but for the images'.
    assert len(products) == 6 + 6 + 5
