"""The operations of RandAugment: brightness value by value, blends with a duller image, affine moves."""

import jax
import jax.numpy as jnp


def look_up(images: jax.Array, table: jax.Array) -> jax.Array:
    """Replaces each level: uint8 [B, H, W, C] by `table[b, c, level]`."""
    batch, height, width, channels = images.shape
    levels = images.reshape(batch, height * width, channels).astype(jnp.int32)
    by_level = jnp.swapaxes(table, 1, 2).astype(jnp.uint8)
    return jnp.take_along_axis(by_level, levels, axis=1, mode="promise_in_bounds").reshape(images.shape)


def histogram(images: jax.Array) -> jax.Array:
    """int32 [B, C, 256]: how many pixels have each level."""

    def counted(levels: jax.Array) -> jax.Array:
        return jnp.zeros(256, jnp.int32).at[levels].add(1, mode="promise_in_bounds")

    pixels = images.reshape(images.shape[0], -1, images.shape[-1]).astype(jnp.int32)
    # Mapped over images, so that each device counts its own.
    return jax.vmap(jax.vmap(counted, in_axes=1))(pixels)


def identity() -> jax.Array:
    """Every level stays."""
    return jnp.arange(256, dtype=jnp.int32)[None, None, :]


def invert() -> jax.Array:
    """Black becomes white."""
    return 255 - identity()


def solarize(threshold: jax.Array) -> jax.Array:
    """Levels from the threshold on, int32 [B], are inverted."""
    return jnp.where(identity() < threshold[:, None, None], identity(), invert())


def posterize(bits: jax.Array) -> jax.Array:
    """Keeps the highest `bits`, int32 [B], of the 8."""
    dropped = (8 - bits)[:, None, None]
    return jnp.left_shift(jnp.right_shift(identity(), dropped), dropped)


def brightness(factor: jax.Array) -> jax.Array:
    """Away from black by a factor, float32 [B]: 0 gives black, 1 the image."""
    return blend(jnp.zeros_like(identity()), identity(), factor[:, None, None])


def contrast(images: jax.Array, factor: jax.Array) -> jax.Array:
    """Away from the mean gray of each image by a factor, float32 [B]: 0 gives gray, 1 the image."""
    total = jnp.sum(gray(images), axis=(1, 2), dtype=jnp.int32)
    pixels = images.shape[1] * images.shape[2]
    mean = (2 * total + pixels) // (2 * pixels)
    return blend(mean[:, None, None], identity(), factor[:, None, None])


def autocontrast(counts: jax.Array) -> jax.Array:
    """Stretches each channel from its darkest to its brightest level; `counts` as from `histogram`."""
    there = counts > 0
    low = jnp.argmax(there, axis=-1).astype(jnp.int32)[..., None]
    high = 255 - jnp.argmax(there[..., ::-1], axis=-1).astype(jnp.int32)[..., None]
    stretched = jnp.clip((identity() - low) * 255 // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, identity())


def equalize(counts: jax.Array) -> jax.Array:
    """Spreads each channel's levels so that all are about as frequent; `counts` as from `histogram`."""
    before = jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts
    # Before the brightest level that occurs are all pixels but its own.
    step = jnp.max(jnp.where(counts > 0, before, 0), axis=-1, keepdims=True) // 255
    spread = jnp.minimum((step // 2 + before) // jnp.maximum(step, 1), 255)
    return jnp.where(step > 0, spread, identity())


def blend(dull: jax.Array, images: jax.Array, factor: jax.Array) -> jax.Array:
    """`dull` where the factor is 0, `images` where it is 1, beyond them otherwise; integers in 0..255, rounded down."""
    dull, wide = dull.astype(jnp.float32), images.astype(jnp.float32)
    return jnp.clip(dull + factor * (wide - dull), 0, 255).astype(images.dtype)


def gray(images: jax.Array) -> jax.Array:
    """int32 [B, H, W]: luma of RGB by ITU-R BT.601, in Pillow's fixed-point numbers; one channel as it is."""
    wide = images.astype(jnp.int32)
    if images.shape[-1] == 1:
        return wide[..., 0]
    return jnp.right_shift(19595 * wide[..., 0] + 38470 * wide[..., 1] + 7471 * wide[..., 2] + 32768, 16)


def gray_images(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, C]: all channels are the gray."""
    return jnp.broadcast_to(gray(images).astype(jnp.uint8)[..., None], images.shape)


def smooth(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, C]: means of 3x3 pixels, the middle one counted five times; the border stays."""
    wide = images.astype(jnp.int32)
    rows = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    return images.at[:, 1:-1, 1:-1].set(((2 * sums + 13) // 26).astype(jnp.uint8))


def warp(values: jax.Array, moves: jax.Array, fill: int) -> jax.Array:
    """Moves images [B, H, W, C] or masks [B, H, W] of any dtype; what comes from outside is `fill`."""
    batch, height, width = values.shape[:3]
    x = (jnp.arange(width, dtype=jnp.float32) + 0.5)[None, None, :]
    y = (jnp.arange(height, dtype=jnp.float32) + 0.5)[None, :, None]
    m = moves[:, :, :, None, None]
    columns = jnp.floor(m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]).astype(jnp.int32)
    rows = jnp.floor(m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]).astype(jnp.int32)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    place = (jnp.where(inside, rows * width + columns, 0)).reshape(batch, height * width, 1)
    flat = values.reshape(batch, height * width, -1)
    found = jnp.take_along_axis(flat, place, axis=1, mode="promise_in_bounds").reshape(values.shape)
    return jnp.where(inside.reshape(inside.shape + (1,) * (values.ndim - 3)), found, jnp.asarray(fill, values.dtype))


def rotation(degrees: jax.Array, height: int, width: int) -> jax.Array:
    """Turns counterclockwise around the middle of the image; [B] degrees."""
    angle = jnp.deg2rad(degrees)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = width / 2, height / 2
    return _moves(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def shear(x: jax.Array, y: jax.Array) -> jax.Array:
    """Moves each row by `x` [B] times its height in the image, each column by `y` [B] times its place."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return _moves(one, x, zero, y, one, zero)


def translation(x: jax.Array, y: jax.Array) -> jax.Array:
    """Moves the image by `x` pixels to the left and `y` up, [B] each."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return _moves(one, zero, x, zero, one, y)


def _moves(*entries: jax.Array) -> jax.Array:
    return jnp.stack(entries, axis=-1).reshape(-1, 2, 3)
