"""Another call for a module, under its class's name."""

from flax import nnx

from mpjax.precision.calls import has_call, with_call


class Block(nnx.Module):
    def __call__(self, x, *, twice=False):
        return 2 * x if twice else x


def test_what_can_be_called():
    class Bare(nnx.Module):
        pass

    assert has_call(Block)
    assert has_call(type("Sub", (Block,), {}))
    assert not has_call(Bare)


def test_the_new_call_is_around_the_old_and_the_class_keeps_its_name():
    cls = with_call(Block, lambda call, self, x, **rest: call(self, x + 1, **rest) + 10, mark="seen")
    block = Block()
    block.__class__ = cls
    assert block(1, twice=True) == 14
    assert (cls.__name__, cls.__qualname__, cls.__module__, cls.mark) == ("Block", "Block", Block.__module__, "seen")
    assert isinstance(block, Block)
