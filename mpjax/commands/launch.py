"""Starts a training: in this process, or with `--distributed.elastic` in a child that can be started again."""

from mpjax.config.schema import Config


def start_training(config: Config) -> None:
    """Trains the run that `config` describes.

    Raises:
      Exception: as `mpjax.commands.train.train_all`, or as `mpjax.commands.elastic.supervise`.
    """
    if config.distributed.elastic:
        from mpjax.commands.elastic import supervise  # without JAX, as the child owns the devices

        supervise(config)
    else:
        from mpjax.commands.train import train_all

        train_all(config)
