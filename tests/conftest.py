"""What every test runs under: strict dtypes and ranks, two CPU devices, cheap compilation, nothing left behind."""

import os
import pathlib
import platform
import sys
from importlib.metadata import version


os.environ.setdefault("JAX_PLATFORMS", os.environ.get("MPJAX_TEST_PLATFORM", "cpu"))
# The filters of warnings have imported mpjax, which may have set an option.
if "device_count" not in os.environ.setdefault("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
if platform.machine() == "x86_64":
    # Processors with float16 arithmetic of their own fuse a product and a sum: their last bits are not those of others.
    os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX2"
# Most of a test's time is compiling: XLA leaves out LLVM's passes, takes the emitters that compile faster (of which
# jaxlib after 0.10 has no choice) and keeps every program, however small. MPJAX_TEST_XLA=optimized leaves XLA as users
# have it. All of it is set in the environment, so that scripts run by tests do likewise.
CHEAP = os.environ.get("MPJAX_TEST_XLA") != "optimized"
if CHEAP:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"  # the workers use all cores already
if CHEAP and version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = ""  # else a program's key names the folder

import hypothesis
import jax
import pytest

import mpjax
from mpjax.config import default_cache_folder, load_config
from mpjax.errors import UsageError


# An example may compile, which takes as long as it takes.
hypothesis.settings.register_profile("mpjax", deadline=None)
hypothesis.settings.load_profile("mpjax")

TESTS = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(mpjax.__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _cache(request, tmp_path_factory):
    """Compiled programs, shared by all workers and kept between runs; prepared data of this worker's alone."""
    kept = getattr(request.config, "cache", None)  # which -p no:cacheprovider takes away
    given = os.environ.get("MPJAX_TEST_PROGRAMS")
    programs = given or (kept.mkdir("programs") if kept else tmp_path_factory.mktemp("programs"))
    cache = tmp_path_factory.mktemp("cache")
    if (compiler := default_cache_folder() / "cuda_compiler").is_dir():
        (cache / compiler.name).symlink_to(compiler, target_is_directory=True)
    (cache / "compiled").symlink_to(programs, target_is_directory=True)
    os.environ["MPJAX_CACHE"] = str(cache)
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))  # as a run sets it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache / "compiled")
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("huggingface"))
    if "datasets" in sys.modules:  # it has read the variable already
        sys.modules["datasets"].config.HF_DATASETS_CACHE = pathlib.Path(os.environ["HF_DATASETS_CACHE"])


@pytest.fixture(scope="module", autouse=True)
def _memory():
    """What one file compiled, no other needs: kept, it would come to gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _nothing_left():
    """A test fails that leaves a setting of JAX, a variable that is read here or the working directory changed."""
    before = _settings()
    yield
    jax.config.update("jax_compilation_cache_dir", before["jax_compilation_cache_dir"])  # each run sets its own
    after = _settings()
    assert [name for name in before | after if before.get(name) != after.get(name)] == []


def _settings():
    # Others are set by libraries when they are imported.
    read = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "MPJAX_", "HF_"))}
    return {**jax.config.values, **read, "working directory": pathlib.Path.cwd()}


@pytest.fixture(autouse=True)
def _optimized(request):
    """Skips what takes XLA as users have it where it is not."""
    if CHEAP and request.node.get_closest_marker("optimized"):
        pytest.skip("MPJAX_TEST_XLA=optimized pytest -m optimized")


@pytest.fixture(autouse=True)
def _strict(request):
    """Where a test mirrors a folder of mpjax, every implicit widening of a dtype or a rank is an error."""
    folder = request.path.relative_to(TESTS).parts[0]
    if not (PACKAGE / folder).is_dir():
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def pytest_collection_modifyitems(items):
    """Puts tests that compile for CUDA where those are that need packages of an extra, and those on Ray first.

    So they are all in the first half, which is one worker's: a second Ray cluster on the machine would slow down both.
    """
    for item in items:
        if "plugin" in getattr(item, "fixturenames", ()):
            item.add_marker("extra")
    items.sort(key=lambda item: "cluster" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def plugin() -> None:
    """Skips the test where XLA's compiler for CUDA is not installed."""
    from mpjax.plan import require_compiler

    try:
        require_compiler()
    except UsageError as error:
        pytest.skip(f"python scripts/plan.py --install: {error}")


@pytest.fixture
def chat_tokenizer(tmp_path):
    """A folder with a tokenizer of bytes and ChatML's template, whose special tokens are 256 to 258."""
    import json

    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
    )
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def small():
    """An MLP that compiles in a second."""
    data = ["--data.name", "synthetic:8x8x1:10", "--data.batch_size", "24"]
    return load_config([*data, "--model.name", "mlp", "--model.width", "16", "--steps", "100"])


@pytest.fixture
def plan_of():
    """Makes plans of round numbers, for what shows them."""
    from mpjax.plan import Communication, Estimate, Fit, Measured, Memory, Roofline, Scale, StepTime, Traffic

    def make(policy: str = "float32", gpu="h100", *, measured: bool = False):
        half = policy != "float32"
        return Estimate(
            overlap=1.0,
            gpu=gpu,
            policy=policy,
            batch=100,
            devices=4,
            attention="cudnn" if half else "xla",
            memory=Memory(1_000_000_000, 2_000_000_000, 0, 500_000_000, 40_000_000_000 // (1 + half), 0),
            limit=40_000_000_000,
            traffic=Traffic(
                8_000_000_000 // (1 + half), 321, 123, 1_000_000, {"all-reduce": {"f32": 1_000_000_000}}, {}
            ),
            flops={"bfloat16" if half else "tensorfloat32": 3e12},
            roofline=Roofline(compute=0.002, traffic=0.008 / (1 + half)),
            communication=Communication(
                bytes={"all-reduce": {"f32": {"data": 1_000_000_000}}},
                timing=StepTime(communication=0.004, exposed=0.002, step=0.01),
                grows="data",
                scaling=[
                    Scale(1, StepTime(communication=0, exposed=0, step=0.008), 1.0),
                    Scale(8, StepTime(communication=0.004, exposed=0.002, step=0.01), 0.8),
                ],
            ),
            fit=Fit(150 * (1 + half), compiled=False),
            measured=Measured(0.01, (0.009, 0.011), 46_000_000_000, "NVIDIA H100 80GB HBM3") if measured else None,
        )

    return make
