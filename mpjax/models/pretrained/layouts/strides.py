"""What a file does not say of its network: the stride of the first convolution."""

from mpjax.errors import UsageError


def require_stride(stride: int) -> None:
    """Raises UsageError unless the first convolution strides by 2.

    One of stride 1 has the same weights, and a network with them computes something else.
    """
    if stride != 2:
        raise UsageError(
            f"its networks stride by 2 in the first convolution, and this one by {stride}: write --model.stem "
            "imagenet, and --data.image_size for larger images, in Python stride=2"
        )
