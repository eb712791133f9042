"""Steps compiled for a GPU that is not there: what mpjax promises of its programs on a GPU."""

import concurrent.futures
import functools
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax.commands import fields_of, planned_step
from mpjax.config import Model, load_config
from mpjax.errors import UsageError
from mpjax.plan import (
    GPUS,
    Compiled,
    HloProgram,
    Traffic,
    bytes_of,
    compiled_for,
    counted,
    mesh_of,
    only_copies,
    order_of,
    parse,
    shapes_of,
    start,
    traced_for,
    traffic_of,
)
from mpjax.training import UNPACKED, Layout, Packed, PackedElementwise, Packing, kernels_of


RESNET18 = "--data.name cifar10 --data.batch_size 400 --model.name resnet18 --model.width 64 --data.crop_padding 0"
RESNET50 = "--data.name imagenet2012 --data.image_size 224 --model.name resnet50 --model.stem imagenet --model.width 64"
LARGE = f"{RESNET50} --data.batch_size 256 --data.crop_padding 0"


@functools.cache
def compiled(flags: str, gpu="h200", devices: int = 1, vocabulary: int = 0) -> Compiled:
    config = load_config(flags.split())
    step = planned_step(config, fields_of(config, vocabulary=vocabulary))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return start(pool, step, gpu, devices=devices).result()


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    compiled.cache_clear()


def moved(program: Compiled) -> Traffic:
    return traffic_of(parse(program.executable.as_text()))


SMALL = "--data.name synthetic:8x8x1:10 --data.batch_size 24 --model.name mlp --model.width 16 --steps 100"


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "bfloat16"])
def test_the_state_is_donated(plugin, policy):
    """Every parameter and every moment is written where it was read: what is given back besides are the metrics."""
    program = compiled(f"{SMALL} --precision.policy {policy} --training.ema 0.9")
    found, memory = program.executable.memory_analysis(), program.memory
    state = memory.parameters + memory.optimizer + memory.statistics
    assert found.argument_size_in_bytes == pytest.approx(state + memory.batch, rel=0.05)
    assert found.alias_size_in_bytes == pytest.approx(state, rel=0.05)
    assert memory.extra < 4096  # addresses of the results and some scalars


def test_operations_are_those_of_the_layers(plugin):
    """64 -> 16 -> 16 -> 10, forward and backward, without the gradient of the images."""
    program = compiled(f"{SMALL} --precision.policy mixed_bfloat16")
    products = [64 * 16, 16 * 16, 16 * 10]
    assert program.flops == {"bfloat16": 2 * 24 * (3 * sum(products) - products[0])}


def test_devices_share_the_batch_and_sum_their_gradients(plugin):
    flags = f"{SMALL} --precision.policy float32 --training.ema 0.9"
    one, four = compiled(flags), compiled(flags, devices=4)
    assert moved(one).collectives == {}
    assert four.flops["tensorfloat32"] == one.flops["tensorfloat32"] / 4
    assert four.memory.batch == one.memory.batch // 4
    summed = moved(four).collectives["all-reduce"]["f32"]
    assert one.memory.parameters <= summed < one.memory.parameters + 200  # and the loss and the accuracy


def test_a_step_that_xla_cannot_compile_is_a_clear_error(plugin, small, monkeypatch):
    def refuse(lowered, **options):
        raise jax.errors.JaxRuntimeError("no tiles")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pytest.raises(UsageError, match="--gpu h100: XLA cannot compile this step for this GPU: no tiles"),
    ):
        start(pool, planned_step(small, fields_of(small)), "h100").result()


@pytest.mark.slow
def test_dynamic_scaling_reads_each_gradient_once_more_and_takes_no_memory(plugin):
    """To update a parameter, it has to be known that all gradients are finite.

    So all gradients are held at the end of the backward pass. With 400 examples no step needs its peak there.
    """
    flags = f"{RESNET18} --precision.policy mixed_float16"
    without, scaled = compiled(f"{flags} --precision.loss_scale none"), compiled(flags)
    assert moved(scaled).bytes - moved(without).bytes <= 1.01 * scaled.memory.parameters
    assert scaled.memory.temporary <= 1.001 * without.memory.temporary


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_no_activation_is_transposed_or_copied(plugin, policy):
    """400 examples: no weight has a side of 400."""
    step = compiled(f"{RESNET18} --precision.policy {policy}")
    program = parse(step.executable.as_text())
    assert moved(step).calls["__cudnn$convForward"] >= 20
    rearranged = [
        each.type
        for computation in program.computations.values()
        for each in computation
        if each.opcode in ("copy", "transpose")
        and any(400 in sizes and len(sizes) == 4 for _, sizes in shapes_of(each.type))
    ]
    assert rearranged == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_the_step_moves_no_more_than_a_hand_written_loop_s(plugin, pytestconfig, monkeypatch):
    """The model, optimizer and metrics of benchmarks/overhead.py, in float32."""
    folder = pytestconfig.rootpath / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("overhead", folder / "overhead.py")
    assert spec
    assert spec.loader
    overhead = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "overhead", overhead)
    spec.loader.exec_module(overhead)
    optimizer, shape = optax.sgd(0.01, momentum=0.9, nesterov=True), (32, 32, 3)
    sharding = NamedSharding(mesh_of("h200", 1), PartitionSpec())
    batch = {"image": jax.ShapeDtypeStruct((40, *shape), jnp.uint8), "label": jax.ShapeDtypeStruct((40,), jnp.int32)}

    def bytes_of(make) -> int:
        steps = []

        def make_state():
            step, state = make()
            steps.append(step)
            return state

        given = (jax.eval_shape(make_state), batch)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given)
        return traffic_of(parse(compiled_for(steps[0].lower(*shapes), "h200").as_text())).bytes

    resnet = Model(name="resnet18", width=64, stem="small")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = bytes_of(lambda: overhead.with_mpjax(resnet, shape, optimizer))
        by_hand = bytes_of(lambda: overhead.hand_written(overhead.LinenResNet18(64, 10), shape, optimizer))
    assert own <= by_hand


@pytest.mark.slow
def test_a_resnet50_in_bfloat16_keeps_half_of_what_float32_keeps(plugin):
    """With 102 GB and 678 small kernels before batch norm had a derivative of its own and vectors were packed."""
    half, full = (compiled(f"{LARGE} --precision.policy {policy}") for policy in ("mixed_bfloat16", "float32"))
    assert half.memory.temporary <= 0.50 * full.memory.temporary
    traffic = moved(half)
    assert traffic.bytes <= 92e9
    program = parse(half.executable.as_text())
    copied = [each.instruction.type for each, _ in counted(order_of(program)) if only_copies(program, each.instruction)]
    # Gradients, transposed in bfloat16; no parameter and no moment.
    assert {dtype for each in copied for dtype, sizes in shapes_of(each) if sizes} == {"bf16"}
    assert traffic.copies < half.memory.parameters
    assert traffic.small <= 339


@pytest.mark.slow
def test_scaling_the_loss_of_a_resnet50_takes_10_kernels_and_a_thousandth_of_the_bytes(plugin):
    """With 39 kernels when a kernel of its own read each gradient of a convolution; 0.1004 % of the bytes when
    gradients of convolutions were cast to float32 before they were laid out."""
    scaled, without = (
        moved(compiled(f"{LARGE} --precision.policy mixed_float16 {more}"))
        for more in ("", "--precision.loss_scale none")
    )
    assert scaled.kernels - without.kernels <= 10
    assert scaled.bytes - without.bytes <= 0.001 * without.bytes


VIT3 = (
    "--data.name imagenet2012 --data.image_size 224 --data.batch_size 256 --data.crop_padding 0 --model.name vit_b16 "
    "--model.depth 3 --optimizer.name adamw"
)
GPT2_2 = (
    "--task language_modeling --data.name docstrings --data.length 1024 --data.batch_size 32 --model.name gpt2 "
    "--model.depth 2 --optimizer.name adamw --training.label_smoothing 0"
)


@functools.cache
def blocks(model: str, policy: str) -> Traffic:
    """The traffic of three blocks of ViT-B/16, or of two of GPT-2 small; docs/performance.md has the whole models."""
    flags, vocabulary = {"vit": (VIT3, 0), "gpt2": (GPT2_2, 50257)}[model]
    return moved(compiled(f"{flags} --precision.policy {policy}", vocabulary=vocabulary))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vit", "gpt2"])
def test_float16_moves_the_bytes_of_bfloat16(plugin, model):
    """ViT moved 0.8 % more when the bias behind attention was cast for each row: a norm then read its input again."""
    float16, bfloat16 = blocks(model, "mixed_float16 --precision.loss_scale none"), blocks(model, "mixed_bfloat16")
    assert float16.bytes == pytest.approx(bfloat16.bytes, rel=0.002)
    assert float16.kernels == bfloat16.kernels


@pytest.mark.slow
@pytest.mark.parametrize(("model", "share"), [("vit", 0.001), ("gpt2", 0.0038)])
def test_scaling_the_loss_of_transformers_takes_8_kernels_and_one_reading_of_each_gradient(plugin, model, share):
    """With 20 and 16 kernels, and 0.37 and 0.50 % of the bytes, when a kernel of its own read each gradient.

    Of GPT-2's 0.37 %, 0.34 % are the gradient of its vocabulary in float32, which weighs more beside two blocks.
    """
    scaled, without = blocks(model, "mixed_float16"), blocks(model, "mixed_float16 --precision.loss_scale none")
    assert scaled.kernels - without.kernels <= 8
    assert scaled.bytes - without.bytes <= share * without.bytes


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more"), [("vit", 0.02), ("gpt2", 0.01)])
def test_float8_by_present_scales_moves_little_more_than_bfloat16(plugin, model, more):
    """13.1 and 3.1 % more, with 1.98 and 1.93 times the kernels, when scales were multiplied as arrays, GELU was
    written in bfloat16 before it was quantised, and query, key and value had gradients of their own."""
    float8, bfloat16 = blocks(model, "mixed_float8"), blocks(model, "mixed_bfloat16")
    assert float8.bytes <= (1 + more) * bfloat16.bytes
    assert float8.kernels <= 1.5 * bfloat16.kernels


@pytest.mark.slow
def test_gpt2_small_reads_its_float32_logits_twice_and_transposes_nothing(plugin):
    """32 x 1024 tokens: 156 GB moved when the cross entropy gathered and scattered, 111 GB before accuracy, GELU and
    the three projections of attention took fewer passes. The promise is 115 GB.

    The head keeps its float32 sums: 3.3 GB more are written, and read by the loss and by its gradient."""
    flags = "--task language_modeling --data.name docstrings --data.length 1024 --data.batch_size 32 --model.name gpt2"
    program = compiled(f"{flags} --optimizer.name adamw --precision.policy mixed_bfloat16", vocabulary=50257)
    traffic = moved(program)
    assert traffic.bytes <= 107.5e9
    assert traffic.copies < 100e6
    assert program.memory.temporary <= 20e9
    assert traffic.small <= 322
    # The head's product and both of its gradients have aligned rows: on an H200, the step takes 17 % less time.
    shapes = re.findall(r"= (\S+) dot\(", program.executable.as_text())
    assert sum("50304" in shape for shape in shapes) == 2  # the third product's result has no such axis
    assert not any("50257" in shape for shape in shapes)


def invariants(program: HloProgram) -> list[str]:
    """The types of the arrays that a loop passes on as they are, and that its body reads."""
    types = []
    for computation in program.computations.values():
        for body in (program.computations[name] for each in computation for name in each.called("body")):
            for index, name in enumerate(body.root.operands):
                value = body.instructions[name]
                passed = value.opcode == "get-tuple-element" and value.attributes.startswith(f", index={index}")
                if passed and any(not user.is_root for user, _ in body.users[name]):
                    types.append(value.type)
    return types


@pytest.mark.parametrize("more", ["--training.chunked_loss 128", "--training.chunked_loss 128 --training.accumulate 2"])
def test_no_loop_reads_an_invariant_array_as_large_as_the_logits_of_a_chunk(plugin, more):
    """8 x 64 tokens. The derivative of a loop over chunks would read an array of class numbers in each of them."""
    flags = "--task language_modeling --data.name docstrings --data.length 64 --data.batch_size 8 --model.name gpt2"
    size = "--model.width 16 --model.depth 1 --model.heads 2 --precision.policy mixed_bfloat16"
    program = parse(compiled(f"{flags} {size} {more}", vocabulary=211).executable.as_text())
    types = invariants(program)
    assert types
    assert max(map(bytes_of, types)) < 128 * 211 * 4


@pytest.mark.slow
def test_gpt2_small_in_chunks_of_4096_tokens_takes_8_gb_less(plugin):
    """It moves 8 GB more, as each chunk adds its gradient of the vocabulary; by JAX's derivative of a loop, 37 GB.

    Its temporary memory is 11.46 GB with jax 0.12, and 11.65 with 0.10.
    """
    flags = "--task language_modeling --data.name docstrings --data.length 1024 --data.batch_size 32 --model.name gpt2"
    more = "--optimizer.name adamw --precision.policy mixed_bfloat16 --training.chunked_loss 4096"
    program = compiled(f"{flags} {more}", vocabulary=50257)
    assert moved(program).bytes <= 115.6e9
    assert program.memory.temporary <= (11.6e9 if jax.__version_info__ >= (0, 11) else 11.7e9)


@pytest.mark.slow
def test_a_vit_b16_with_its_augmentations(plugin, pytestconfig):
    """763 small kernels before vectors and biases of attention were packed."""
    flags = f"--config {pytestconfig.rootpath / 'configs' / 'imagenet_vit_s16.toml'} --model.name vit_b16"
    traffic = moved(compiled(f"{flags} --data.batch_size 256 --precision.policy mixed_bfloat16"))
    assert traffic.bytes <= 118e9
    assert traffic.small <= 381


@pytest.mark.slow
def test_a_vit_b16_adds_biases_where_they_cost_no_pass(plugin):
    """Three of its twelve blocks at batch 256, not augmented: 31.8 GB when the biases of attention were added one
    by one, 29.65 when that of the MLP was cast in the kernel that adds it. docs/performance.md has the whole model."""
    flags = "--data.name imagenet2012 --data.image_size 224 --data.batch_size 256 --data.crop_padding 0"
    model = "--model.name vit_b16 --model.depth 3 --optimizer.name adamw --precision.policy mixed_bfloat16"
    assert moved(compiled(f"{flags} {model}")).bytes <= 29.5e9


KERNEL = "__gpu$xla.gpu.triton"
"""The call of a kernel of Pallas."""
TRITON = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@pytest.mark.slow
@TRITON
def test_the_kernel_of_norms_saves_two_passes_over_the_activations_of_each(plugin):
    """Three blocks of ViT-B: 29.36 GB without the kernel. Two of GPT-2 small: 45.27, of which the head moves most."""
    flags = "--data.name imagenet2012 --data.image_size 224 --data.batch_size 256 --data.crop_padding 0"
    vit = "--model.name vit_b16 --model.depth 3 --optimizer.name adamw --precision.policy mixed_bfloat16"
    traffic = moved(compiled(f"{flags} {vit} --model.norm_kernel pallas"))
    assert traffic.calls[KERNEL] == 6
    assert traffic.bytes <= 28.3e9
    flags = "--task language_modeling --data.name docstrings --data.length 1024 --data.batch_size 32 --model.name gpt2"
    gpt2 = "--model.depth 2 --optimizer.name adamw --precision.policy mixed_bfloat16"
    traffic = moved(compiled(f"{flags} {gpt2} --model.norm_kernel pallas", vocabulary=50257))
    assert traffic.calls[KERNEL] == 4
    assert traffic.bytes <= 44.8e9


@pytest.mark.slow
@TRITON
@pytest.mark.parametrize("mesh", ["--mesh.data 4", "--mesh.fsdp 4"])
def test_each_of_several_gpus_runs_the_kernel_of_norms_on_its_share(plugin, mesh):
    """Two blocks; 16 examples of 64 positions for each GPU."""
    program = parse(compiled(f"{OWN_LOOP['vit']} --model.norm_kernel pallas {mesh}", devices=4).executable.as_text())
    instructions = [each for computation in program.computations.values() for each in computation]
    shapes = [shapes_of(each.type)[0] for each in instructions if each.target == KERNEL]
    assert shapes == 4 * [("bf16", (1024, 64))]


OWN_LOOP = {
    "resnet": "--data.name cifar10 --data.batch_size 64 --model.name resnet18 --model.width 16 --data.crop_padding 0 "
    "--precision.policy mixed_bfloat16",
    "vit": "--data.name cifar10 --data.batch_size 64 --model.name vit_ti16 --model.patch 4 --model.width 64 "
    "--model.heads 2 --model.depth 2 --data.crop_padding 0 --precision.policy mixed_bfloat16",
    "gpt2": "--task language_modeling --data.name docstrings --data.length 128 --data.batch_size 8 --model.name gpt2 "
    "--model.width 64 --model.heads 2 --model.depth 2 --precision.policy mixed_bfloat16",
}


@functools.cache
def of_own_loop(flags: str, packed: type[Packed] | None = None, *, as_written: bool = True) -> Traffic:
    """The traffic of the step that a library's user builds for the model of a run, with or without packed arrays."""
    config = load_config(flags.split())
    step = planned_step(config, fields_of(config))
    mesh = mesh_of("h200", 1)
    layout, objective = Layout(mesh), step.task.objective
    kernels = kernels_of(step.task.abstract)
    packing = Packing.of(step.state.params, step.state.stats, kernels) if packed else UNPACKED
    state = jax.eval_shape(packing.pack, step.state)
    shardings = layout.state(state), dict.fromkeys(step.batch, layout.batch(size=step.batch_size, accumulate=1))
    state, batch = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (state, step.batch), shardings
    )
    with traced_for(GPUS["h200"], mesh.devices.flat[0], "auto"):
        own = mpjax.make_train_step(
            packed(step.task.structure, packing) if packed else step.task.structure,
            step.tx,
            objective.loss_of,
            prepare=objective.prepare,
            learning_rate=optax.warmup_cosine_decay_schedule(0, 0.1, 10, 100),
            layout=layout,
            compiler_options=None if as_written else {},
        )
        return traffic_of(parse(compiled_for(own.trace(state, batch).lower(), "h200").as_text()))


@pytest.mark.parametrize("flags", OWN_LOOP.values(), ids=OWN_LOOP)
def test_the_step_of_a_users_own_loop_moves_what_the_step_of_a_run_moves(plugin, flags):
    """With packed arrays, as in benchmarks/gpu.py, it is the same program; with one kernel more for any optimizer."""
    run = moved(compiled(flags))
    assert of_own_loop(flags).bytes == pytest.approx(run.bytes, rel=0.01)
    packed = of_own_loop(flags, PackedElementwise)
    assert packed.bytes == pytest.approx(run.bytes, rel=0.001)
    assert packed.kernels == run.kernels
    by_path = of_own_loop(flags, Packed)
    assert by_path.bytes == pytest.approx(run.bytes, rel=0.0003)
    assert by_path.kernels <= run.kernels + 1


def test_a_vit_with_a_class_token_has_the_attention_of_cudnn(plugin):
    """65 positions of 64 patches, padded to 66."""
    assert moved(compiled(f"{OWN_LOOP['vit']} --model.pool cls")).calls["__cudnn$fmhaSoftmaxBackward"] == 2


def test_casts_that_xla_takes_out_cost_bytes_in_a_users_own_loop_too(plugin):
    """The derivative of GELU writes float32 gradients to memory."""
    assert of_own_loop(OWN_LOOP["vit"], as_written=False).bytes > 1.02 * of_own_loop(OWN_LOOP["vit"]).bytes
