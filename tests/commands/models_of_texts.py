"""Language models of one's own, which can be called with parts of texts or cannot."""

import jax.numpy as jnp
from flax import nnx

from mpjax.models import WholeTexts, attend


class Bag(nnx.Module):
    """Logits of each token alone."""

    def __init__(self, fields, *, rngs: nnx.Rngs):
        tokens = fields["tokens"].vocabulary
        self.tokens = nnx.Embed(tokens, 8, rngs=rngs)
        self.head = nnx.Linear(8, tokens, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.tokens(tokens))


class Alone(Bag):
    """A mean over the tokens so far, which forgets that it is called with a part of a text."""

    context = WholeTexts()

    def __call__(self, tokens):
        x = jnp.cumsum(self.tokens(tokens), axis=1)
        return self.head(x / (1 + self.context.places(tokens.shape[1])).astype(x.dtype)[None, :, None])


def losses(model, batch, key):
    """An objective of one's own, of whole texts."""
    del key
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    return {"loss": jnp.mean(logits**2, axis=(1, 2))}


class Divided(Alone):
    """Attention by the function of its context."""

    def __call__(self, tokens):
        x = self.tokens(tokens).reshape(*tokens.shape, 2, 4)
        mixed = self.context.attend(attend)(x, x, x, is_causal=True)
        return self.head(mixed.reshape(*tokens.shape, 8))


class Both(Divided):
    """Attention by the function of its context, and a mean over the tokens of a text."""

    def __call__(self, tokens):
        return super().__call__(tokens) + self.head(jnp.mean(self.tokens(tokens), axis=1, keepdims=True))
