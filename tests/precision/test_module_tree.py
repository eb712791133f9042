"""The modules of a model by name: lineages, second names, and whose variables are whose."""

from flax import nnx

from mpjax.precision import class_names, lineages_of, modules_of, second_names, variables_by_module


class Tied(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.again = self.first
        self.scale = nnx.Param(nnx.Rngs(0).params.normal((2,)))


def test_a_lineage_starts_at_the_root_and_ends_at_the_module():
    lineages = lineages_of(modules_of(Tied()))
    by_path = {lineage[-1][0]: [name for name, _ in lineage] for lineage in lineages}
    assert by_path["blocks/0"][0] == ""
    assert by_path["blocks/0"][-1] == "blocks/0"
    assert by_path[""] == [""]


def test_a_shared_module_has_a_second_name():
    assert list(second_names(modules_of(Tied())).items()) in ([("first", "again")], [("again", "first")])


def test_variables_belong_to_the_innermost_module_that_holds_them():
    model = Tied()
    found = variables_by_module(model, modules_of(model))
    assert found[""] == [model.scale]
    assert len(found["blocks/0"]) == 2


def test_class_names_end_before_the_base_class():
    class Mine(nnx.Linear):
        pass

    assert list(class_names(Mine(2, 2, rngs=nnx.Rngs(0)))) == ["Mine", "Linear"]
