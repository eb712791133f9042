"""Entry points of the scripts: each takes arguments, returns an exit code, and prints user errors without traceback."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence

from mpjax.errors import Diverged, Interrupted, UsageError, exit_code_of, show_warning


def train(argv: Sequence[str]) -> int:
    """Runs `scripts/train.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config import load_config

        config = load_config(argv, prog="train.py")
        # Imported late: --help and wrong flags answer before JAX is imported.
        from mpjax.commands.train import run

        run(config)

    return exit_code(command)


def train_ray(argv: Sequence[str]) -> int:
    """Runs `scripts/train_ray.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config.on_ray import load_on_ray

        settings, config = load_on_ray(argv, prog="train_ray.py")
        from mpjax.commands.train_ray import train_on_ray

        train_on_ray(settings, config)

    return exit_code(command)


def evaluate(argv: Sequence[str]) -> int:
    """Runs `scripts/evaluate.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config.commands import Evaluation, load_settings

        settings = load_settings(Evaluation, argv, prog="evaluate.py")
        from mpjax.commands.evaluate import evaluate_run

        evaluate_run(settings)

    return exit_code(command)


def diagnose(argv: Sequence[str]) -> int:
    """Runs `scripts/diagnose.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config.commands import Diagnose, load_settings

        settings = load_settings(Diagnose, argv, prog="diagnose.py")
        from mpjax.commands.diagnose import diagnose_run

        diagnose_run(settings)

    return exit_code(command)


def compare(argv: Sequence[str]) -> int:
    """Runs `scripts/compare.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config.comparison import load_comparison

        settings = load_comparison(argv, prog="compare.py")
        from mpjax.commands.compare import compare_runs

        compare_runs(settings)

    return exit_code(command)


def export(argv: Sequence[str]) -> int:
    """Runs `scripts/export.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config.commands import Export, load_settings

        settings = load_settings(Export, argv, prog="export.py")
        from mpjax.commands.export import export_run

        export_run(settings)

    return exit_code(command)


def plan(argv: Sequence[str]) -> int:
    """Runs `scripts/plan.py` and returns its exit code."""

    def command() -> None:
        from mpjax.config.plan import load_plan

        settings, config = load_plan(argv, prog="plan.py")
        from mpjax.commands.plan import plan_run

        plan_run(settings, config)

    return exit_code(command)


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code.

    Returns:
      0: done; 1: system error; 2: usage error; 3: diverged; 128 + signal number: interrupted.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.showwarning = show_warning
    try:
        command()
    except SystemExit as error:  # tyro has printed the message
        return error.code if isinstance(error.code, int) else 2
    except (UsageError, Diverged, Interrupted) as error:
        return _fail(error, exit_code_of(error))
    except KeyboardInterrupt as error:
        return _fail("interrupted", exit_code_of(error))
    except BrokenPipeError:  # the reader of stdout has closed it
        sys.stdout = None
        return 1
    except OSError as error:
        return _fail(error, 1)
    return 0


def _fail(error: object, code: int) -> int:
    print(f"error: {error}" if code < 128 else error, file=sys.stderr)
    return code
