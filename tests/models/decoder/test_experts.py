"""Mixtures of experts: who computes which token, in which dtype, how evenly, and what settings are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.diagnosis import expert_flips
from mpjax.errors import UsageError
from mpjax.models import stacks_of
from mpjax.models.decoder import Decoder, Experts, ExpertSettings, Router, settings_of, tiles_of
from mpjax.models.generation import through_cache
from mpjax.precision.casting import equations
from mpjax.training import kernels_of, language_modeling, make_mesh, tensor_axes


CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
}
SETTINGS = ExpertSettings(count=4, each=2, hidden=8, normalised=True, sparse=(True,), balance=0.01)
TOKENS = jnp.arange(16).reshape(2, 8) % 20


def test_tiles_hold_every_choice_once_beside_those_of_the_same_expert():
    chosen = jnp.asarray([[1, 0], [1, 3], [1, 0]])
    slots, sources, experts = jax.tree.map(np.asarray, tiles_of(chosen, 4))
    assert sources.shape == (6, 1)  # 6 choices of 4 experts: tiles of one row
    assert experts[:6].tolist() == [0, 0, 1, 1, 1, 3]
    assert slots.tolist() == [[2, 0], [3, 5], [4, 1]]
    assert sources[:, 0].tolist() == [1, 5, 0, 2, 4, 3]


def test_tiles_suffice_where_all_tokens_choose_one_expert():
    slots, sources, experts = jax.tree.map(np.asarray, tiles_of(jnp.full((32, 1), 2), 4))
    assert sources.shape == (7, 8)  # at most (32 + 4 * 7) / 8
    assert sorted(slots[:, 0].tolist()) == list(range(32))
    assert experts[:4].tolist() == [2, 2, 2, 2]
    assert np.sum(sources < 32) == 32


def dense(experts, x, chosen, weights):
    """Every expert computes every token; those that are not chosen have weight 0."""
    gate, up, down = (kernel[...] for kernel in (experts.gate, experts.up, experts.down))
    each = jnp.einsum("nd,edf->enf", x, gate), jnp.einsum("nd,edf->enf", x, up)
    results = jnp.einsum("enf,efd->end", jax.nn.silu(each[0]) * each[1], down)
    shares = jnp.sum(jax.nn.one_hot(chosen, 4) * weights[..., None], axis=1)
    return jnp.einsum("end,ne->nd", results, shares)


@pytest.mark.parametrize("tokens", [3, 96])
def test_experts_compute_what_all_experts_with_weights_of_zero_compute(tokens):
    normal = nnx.initializers.normal(0.5)
    experts = Experts(6, SETTINGS, activation="silu", out_init=normal, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 3)
    x, weights = jax.random.normal(keys[0], (tokens, 6)), jax.random.uniform(keys[1], (tokens, 2))
    chosen = jax.lax.top_k(jax.random.normal(keys[2], (tokens, 4)).at[:, 3].add(2.0), 2)[1]  # unbalanced

    def loss(of, experts, x, weights):
        return jnp.sum(jnp.square(of(experts, x, chosen, weights)))

    def sparse(experts, x, chosen, weights):
        return experts(x, chosen, weights)

    ours, theirs = (
        nnx.grad(functools.partial(loss, of), argnums=(0, 1, 2))(experts, x, weights) for of in (sparse, dense)
    )
    np.testing.assert_allclose(sparse(experts, x, chosen, weights), dense(experts, x, chosen, weights), atol=1e-6)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_a_program_for_any_number_of_tokens_computes_the_same():
    experts = Experts(6, SETTINGS, activation="silu", out_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(0))

    def program(x, chosen, weights):
        return experts(x, chosen, weights)

    (tokens,) = jax.export.symbolic_shape("n")
    shapes = [
        jax.ShapeDtypeStruct((tokens, *shape), dtype)
        for shape, dtype in [((6,), np.float32), ((2,), np.int32), ((2,), np.float32)]
    ]
    exported = jax.export.export(jax.jit(program))(*shapes)
    for count in (1, 100):  # fewer choices than rows of a tile, and several tiles of an expert
        x = jax.random.normal(jax.random.key(count), (count, 6))
        chosen = jnp.stack([jnp.arange(count) % 2, jnp.full(count, 3)], axis=1).astype(jnp.int32)
        weights = jnp.full((count, 2), 0.5)
        np.testing.assert_allclose(exported.call(x, chosen, weights), program(x, chosen, weights), atol=1e-6)


def test_a_program_has_no_product_of_all_experts_with_all_tokens():
    """64 tokens with 2 of 4 experts: 128 rows in tiles of 32, at most 7 of them."""
    normal = nnx.initializers.normal(0.5)
    experts = Experts(6, SETTINGS, activation="silu", out_init=normal, rngs=nnx.Rngs(0))
    program = jax.make_jaxpr(experts.__call__)(jnp.zeros((64, 6)), jnp.zeros((64, 2), jnp.int32), jnp.zeros((64, 2)))
    shapes = {eqn.outvars[0].aval.shape for _, eqn in equations(program.jaxpr) if eqn.primitive.name == "dot_general"}
    assert shapes == {(7, 32, 8), (7, 32, 6)}


def test_gradients_are_added_in_float32_over_tiles_and_over_the_experts_of_a_token():
    """The first expert has 3 tiles. Of the sums, only those of a product are in bfloat16."""
    experts = Experts(6, SETTINGS, activation="silu", out_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    mpjax.apply_policy(experts, "mixed_bfloat16")
    graph, params = nnx.split(experts)
    chosen = jnp.broadcast_to(jnp.asarray([0, 1]), (64, 2))

    def loss(params, x):
        return jnp.sum(nnx.merge(graph, params)(x, chosen, jnp.ones((64, 2))).astype(jnp.float32))

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, jnp.ones((64, 6), jnp.bfloat16))
    adds = [eqn for _, eqn in equations(program.jaxpr) if eqn.primitive.name in ("scatter-add", "reduce_sum")]
    kinds = {(eqn.primitive.name, str(eqn.outvars[0].aval.dtype), eqn.params.get("unique_indices")) for eqn in adds}
    # Slots and rows are used once each: their scatters add nothing.
    assert kinds == {
        ("scatter-add", "int32", False),
        ("scatter-add", "float32", False),
        ("scatter-add", "bfloat16", True),
        ("reduce_sum", "float32", None),
    }


def test_the_policy_computes_routers_in_float32_by_a_visible_rule():
    model = Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0))
    for policy in ("mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "O3"):
        rows = {row.path: row for row in mpjax.apply_policy(model, policy)}
        router, experts = rows["blocks/1/mlp/router"], rows["blocks/1/mlp/experts"]
        assert (router.compute_dtype, router.param_dtype, router.rule) == (np.float32, np.float32, "type:Router")
        assert experts.compute_dtype == mpjax.get_policy(policy).compute_dtype
    mpjax.apply_policy(model, mpjax.Policy("float32", "bfloat16", "float32", rules={"type:Router": "bfloat16"}))
    assert model.blocks[0].mlp.router.dtype == jnp.bfloat16


def test_a_router_in_float32_tells_logits_apart_that_bfloat16_does_not():
    settings = ExpertSettings(count=3, each=1, hidden=1, normalised=False, sparse=(), balance=0.0)
    router = Router(1, settings, rngs=nnx.Rngs(0))
    router.kernel.set_value(jnp.asarray([[1.0, 1.001, 0.0]]))
    x = jnp.ones((1, 1, 1), jnp.bfloat16)
    assert router(x).chosen.item() == 1
    router.dtype = jnp.dtype("bfloat16")
    assert router(x).chosen.item() == 0


def test_experts_whose_use_is_even_have_the_smallest_balance_loss():
    """E sum f p is K = 2 for even use. Layer by layer, the shares of choices and probabilities are multiplied."""
    model = Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0))
    for block in model.blocks:
        block.mlp.router.kernel.set_value(jnp.zeros((16, 4)))
    values = language_modeling()(model, {"tokens": jnp.concatenate([TOKENS, TOKENS[:, :1]], axis=1)}, jax.random.key(0))
    assert float(values["router_loss"].value) == pytest.approx(2.0)
    plain = language_modeling()(model, {"tokens": jnp.concatenate([TOKENS, TOKENS[:, :1]], axis=1)}, None)
    assert "router_loss" not in plain
    difference = jnp.mean(values["loss"]) - jnp.mean(plain["loss"])
    assert float(difference) == pytest.approx(0.001 * 2.0, rel=1e-3)


def test_layers_without_experts_stand_among_others():
    model = Decoder(settings_of({**CONFIG, "mlp_only_layers": [0]}), rngs=nnx.Rngs(0))
    assert [type(block.mlp).__name__ for block in model.blocks] == ["GatedMLP", "MixtureOfExperts"]
    flips = expert_flips(model, TOKENS, "float32", "float32")
    assert (flips.tokens, flips.flipped, len(flips.layers)) == (16, 0.0, 1)
    with pytest.raises(UsageError, match=r"scan_blocks: block 1 differs from block 0 in structure"):
        Decoder(settings_of({**CONFIG, "mlp_only_layers": [0]}), scan_blocks=True, rngs=nnx.Rngs(0))


def test_kernels_of_experts_decay_are_matrices_and_are_divided_by_hidden_units():
    for scan in (False, True):
        model = Decoder(settings_of(CONFIG), scan_blocks=scan, rngs=nnx.Rngs(0))
        axes, block = tensor_axes(model, 2, {"*attention*": "whole"}), "all" if scan else "1"
        lead = 1 if scan else 0
        assert axes[f"blocks/{block}/mlp/experts/gate"] == lead + 2
        assert axes[f"blocks/{block}/mlp/experts/down"] == lead + 1
        kernels = kernels_of(model)
        assert kernels.matrices["blocks/1/mlp/experts/up"] == (1, 1)
        assert stacks_of(model) == ({"blocks": 2} if scan else {})
    with pytest.raises(UsageError, match=r"--mesh.tensor 3 does not divide blocks/0/mlp/experts, whose experts have 8"):
        tensor_axes(model := Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0)), 3, {"*attention*": "whole"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5: there are 4 experts"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]: wanted numbers of layers, from 0 to 1"),
        ({"num_local_experts": 8}, "num_experts is 4: num_local_experts is 8"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef is -1.0: wanted a number of at least 0"),
        ({"shared_expert_intermediate_size": 8}, "mpjax does not know shared_expert_intermediate_size 8"),
        (
            {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "router_jitter_noise": 0.1},
            "router_jitter_noise is 0.1: the decoder of mpjax has 0.0 or 0 only",
        ),
    ],
)
def test_settings_of_experts_that_are_not_understood_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        settings_of({**CONFIG, **change})


def test_generation_computes_the_logits_of_whole_texts():
    model = Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(through_cache(model, TOKENS, prompt=5), model(TOKENS), atol=1e-5)


@pytest.mark.slow
def test_the_balance_loss_of_shards_is_that_of_the_batch():
    """Not the mean of the shards' losses: the shares of experts are those of all tokens."""
    graph, params = nnx.split(Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0)))
    tokens = jnp.asarray([[1, 1, 1, 1, 1, 1], [2, 9, 4, 3, 7, 5]])

    def balance(tokens):
        values = language_modeling()(nnx.merge(graph, params), {"tokens": tokens}, jax.random.key(0))
        return values["router_loss"]

    mesh, spec = make_mesh(jax.devices()[:2], data=2), jax.sharding.PartitionSpec("data")
    parts = jax.jit(jax.shard_map(balance, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(tokens)
    whole = balance(tokens)
    assert float(jnp.sum(parts.total) / jnp.sum(parts.weight)) == pytest.approx(float(whole.value), rel=1e-6)
    alone = [float(balance(row[None]).value) for row in tokens]
    assert abs(np.mean(alone) - float(whole.value)) > 1e-3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS + 100, "tokens from 100 to 115 of 20"),
        (TOKENS[0], r"tokens are int32\[8\]; wanted integers \[B, T\]"),
        (TOKENS / 2, "tokens are float32"),
    ],
)
def test_flips_of_other_tokens_are_an_error(tokens, message):
    with pytest.raises(UsageError, match=message):
        expert_flips(Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0)), tokens)


def test_flips_where_a_router_overflows_are_an_error():
    decoder = Decoder(settings_of(CONFIG), rngs=nnx.Rngs(0))
    decoder.tokens.embedding[...] = 1e7 * decoder.tokens.embedding[...]
    with pytest.raises(UsageError, match="under mixed_float16, the router of layer 0 is not finite"):
        expert_flips(decoder, TOKENS, "float32", "mixed_float16")
