"""Which variables of a model its weights are."""

from flax import nnx

from mpjax.models.pretrained import variables_of


def test_parameters_and_statistics_are_random_streams_are_not(small):
    assert sorted(variables_of(small)) == [
        "head/kernel",
        "norm/bias",
        "norm/mean",
        "norm/scale",
        "norm/var",
        "stem/bias",
        "stem/kernel",
    ]


def test_they_are_the_models_own(small):
    variables_of(small)["stem/bias"].set_value([7, 8])
    assert small.stem.bias.get_value() == [7, 8]


def test_a_variable_in_two_places_is_named_as_a_split_names_it():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(2, 2, rngs=rngs)
            self.into = nnx.Linear(2, 2, rngs=rngs)
            self.into.kernel = self.out.kernel
            self.more = nnx.Dict(weight=nnx.Param(rngs.params.uniform((2,))), none=nnx.Param(None))

    model = Tied(nnx.Rngs(0))
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert sorted(variables_of(model)) == ["into/bias", "into/kernel", "more/weight", "out/bias"]
    assert set(variables_of(model)) == set(names) - {"more/none"}
