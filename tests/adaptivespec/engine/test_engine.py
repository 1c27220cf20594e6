"""The target engine: whatever is packed together, every request gets what it would get alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.engine.engine import Forwarded, TargetEngine
from adaptivespec.errors import CacheFull, ConfigError
from adaptivespec.messages import Chunk, StateRows
from adaptivespec.models.decoder import Decoder
from adaptivespec.sampling import SamplingParams
from adaptivespec.tree import DraftTrees, roots
from tests.adaptivespec.trees import Tree, batch, trees
from tests.decoders import prefill, tiny_decoder

GREEDY = SamplingParams()
PROMPT = [1, 17, 300, 45, 8, 8, 211, 90]
NO_TREES = roots([])

DECODER = tiny_decoder("qwen3", num_hidden_layers=6)


def logits_of(tokens: list[int], decoder: Decoder = DECODER) -> Tensor:
    """Logits [T, V] of a whole sequence in one chain: the reference."""
    cache = decoder.new_cache(len(tokens))
    cache.open(0, len(tokens))
    return prefill(decoder, cache, 0, tokens)


def opened(*prompts: list[int], sampling: SamplingParams = GREEDY) -> TargetEngine:
    """An engine with request i holding the tokens of prompts[i]."""
    engine = TargetEngine(DECODER, 512)
    for request, prompt in enumerate(prompts):
        engine.open(request, 64, sampling)
        engine.forward([Chunk(request, prompt, False)], [], NO_TREES)
    return engine


def verify(engine: TargetEngine, request: int, tree: Tree) -> Forwarded:
    return engine.forward([], [request], batch([tree]))


def greedy(prompt: list[int], count: int) -> list[int]:
    """Plain decoding, every token from a fresh pass over everything before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


BUSHY = Tree([5, 7, 9, 11, 13, 15, 17], [-1, 0, 0, 1, 1, 3, 2], [0.0] * 7)


@settings(deadline=None, max_examples=25)
@given(tree=trees(max_nodes=10))
def test_every_node_sees_its_own_path_only(tree: Tree) -> None:
    result = verify(opened(PROMPT), 0, tree)
    for node, parent in enumerate(tree.parents):
        path = [tree.tokens[i] for i in tree.path(node)]
        logits = logits_of(PROMPT + path)
        assert result.target[0, node] == logits[-1].argmax()
        if parent >= 0:
            log_p = logits[-2].log_softmax(-1)
            expected = log_p[tree.tokens[node]] - log_p.max()
            torch.testing.assert_close(result.gap[0, node], expected, rtol=1e-4, atol=1e-4)
    assert result.gap[0, 0] == -torch.inf


@settings(deadline=None, max_examples=15)
@given(tree=trees(max_nodes=8), data=st.data())
def test_a_committed_path_continues_like_a_fresh_prefill(tree: Tree, data: st.DataObject) -> None:
    path = tree.path(data.draw(st.integers(0, len(tree.tokens) - 1)))
    engine = opened(PROMPT)
    verify(engine, 0, tree)
    engine.commit(0, path)
    kept = PROMPT + [tree.tokens[i] for i in path]
    assert engine.length(0) == len(kept)
    result = verify(engine, 0, BUSHY)
    for node in range(len(BUSHY.tokens)):
        tokens = kept + [BUSHY.tokens[i] for i in BUSHY.path(node)]
        assert result.target[0, node] == logits_of(tokens)[-1].argmax()


def test_one_pass_mixes_chunks_and_trees_of_many_requests() -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
    small = Tree([4, 6], [-1, 0], [0.0] * 2)
    engine = opened(*prompts[:2])
    engine.open(2, 64, GREEDY)
    engine.open(3, 64, GREEDY)
    mixed = engine.forward(
        [Chunk(2, prompts[2], True), Chunk(3, PROMPT[:5], False)], [1, 0], batch([small, BUSHY])
    )
    alone = opened(*prompts[:2])
    for row, (request, tree) in enumerate([(1, small), (0, BUSHY)]):
        size = len(tree.tokens)
        single = verify(alone, request, tree)
        assert torch.equal(mixed.target[row, :size], single.target[0])
        torch.testing.assert_close(mixed.gap[row, :size], single.gap[0], rtol=1e-4, atol=1e-4)
    assert mixed.target[0, 2:].tolist() == [-1] * 5
    assert mixed.gap[0, 2:].tolist() == [-torch.inf] * 5
    assert mixed.first_tokens == greedy(prompts[2], 1)
    assert (engine.length(2), engine.length(3)) == (len(prompts[2]), 5)


def test_a_prompt_in_chunks_gives_the_first_token_of_the_whole() -> None:
    engine = TargetEngine(DECODER, 64)
    engine.open(0, 32, GREEDY)
    first = engine.forward([Chunk(0, PROMPT[:3], False)], [], NO_TREES)
    last = engine.forward([Chunk(0, PROMPT[3:], True)], [], NO_TREES)
    assert (first.first_tokens, last.first_tokens) == ([], greedy(PROMPT, 1))


def test_root_only_trees_are_plain_decoding() -> None:
    engine = opened(PROMPT[:-1])
    token, produced = PROMPT[-1], []
    for _ in range(6):
        token = int(engine.forward([], [0], roots([token])).target[0, 0])
        engine.commit(0, [0])
        produced.append(token)
    assert produced == greedy(PROMPT, 6)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(1.0, seed=3), SamplingParams(1.5, top_k=20, top_p=0.9, seed=4)]
)
def test_a_seed_gives_the_same_text_whatever_was_drafted(sampling: SamplingParams) -> None:
    engine = opened(PROMPT[:-1], PROMPT[:-1], sampling=sampling)
    plain = [PROMPT[-1]]
    for _ in range(6):
        plain.append(int(engine.forward([], [0], roots([plain[-1]])).target[0, 0]))
        engine.commit(0, [0])
    chain = Tree(plain[:6], [-1, 0, 1, 2, 3, 4], [0.0] * 6)
    assert verify(engine, 1, chain).target[0].tolist() == plain[1:]
    engine.open(2, 64, sampling)
    assert engine.forward([Chunk(2, PROMPT, True)], [], NO_TREES).first_tokens == plain[1:2]


def test_requests_keep_their_text_when_the_arena_is_compacted() -> None:
    engine = TargetEngine(DECODER, 96)
    for request in range(3):
        engine.open(request, 32, GREEDY)
        engine.forward([Chunk(request, PROMPT[request:], False)], [], NO_TREES)
    engine.close(0)
    engine.close(2)
    engine.open(3, 64, GREEDY)  # fits only when request 1 moves
    result = engine.forward([Chunk(3, PROMPT, True)], [1], batch([BUSHY]))
    assert result.target[0, -1] == logits_of([*PROMPT[1:], 5, 9, 17])[-1].argmax()
    assert result.first_tokens == greedy(PROMPT, 1)
    with pytest.raises(CacheFull):
        engine.open(4, 1, GREEDY)


def test_a_tree_that_was_never_committed_leaves_no_trace() -> None:
    engine = opened(PROMPT)
    first = verify(engine, 0, BUSHY)
    second = verify(engine, 0, BUSHY)
    assert torch.equal(first.target, second.target)
    assert engine.length(0) == len(PROMPT)


def test_states_of_accepted_nodes_are_those_of_a_fresh_prefill() -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    engine = TargetEngine(DECODER, 128, lambda x: x @ weight.T, aux_layers=(2, 3, 5))
    for request in (0, 1):
        engine.open(request, 32, GREEDY)
    engine.forward([Chunk(0, PROMPT, False)], [], NO_TREES)
    verify(engine, 0, BUSHY)
    engine.commit(0, [0, 2, 6])
    engine.forward([Chunk(1, [*PROMPT, 5, 9, 17], False)], [], NO_TREES)
    states = engine.states([StateRows(0, 0, 11)])
    assert states.shape == (11, 16)
    fresh = engine.states([StateRows(1, 0, 11)])
    torch.testing.assert_close(states, fresh, rtol=1e-4, atol=1e-4)


def test_states_need_layers_that_exist() -> None:
    with pytest.raises(ConfigError, match="2 layers"):
        TargetEngine(tiny_decoder(), 16, lambda x: x, aux_layers=(0, 1, 2))


def test_closing_frees_the_cache() -> None:
    engine = opened(PROMPT, PROMPT)
    assert (engine.requests, engine.used) == (2, 128)
    engine.close(0)
    engine.close(0)
    assert (engine.requests, engine.used) == (1, 64)
    with pytest.raises(KeyError):
        engine.forward([], [0], roots([5]))


def test_a_tree_beyond_the_capacity_is_refused_and_the_request_lives_on() -> None:
    engine = TargetEngine(DECODER, 64)
    engine.open(0, 10, GREEDY)
    engine.forward([Chunk(0, PROMPT, False)], [], NO_TREES)
    with pytest.raises(ValueError, match="capacity 10"):
        verify(engine, 0, BUSHY)
    assert engine.forward([], [0], roots([5])).target.tolist() == [greedy([*PROMPT, 5], 1)]


def test_an_empty_pass_is_allowed() -> None:
    result = TargetEngine(DECODER, 16).forward([], [], NO_TREES)
    assert result.target.shape == (0, 1)
    assert result.first_tokens == []


def test_trees_may_be_padded_wider_than_any_of_them() -> None:
    padded = batch([BUSHY])
    wide = DraftTrees(
        torch.nn.functional.pad(padded.tokens, (0, 3), value=-1),
        torch.nn.functional.pad(padded.parents, (0, 3)),
        torch.nn.functional.pad(padded.logprobs, (0, 3), value=-torch.inf),
    )
    engine = opened(PROMPT)
    result = engine.forward([], [0], wide)
    assert torch.equal(result.target[:, :7], verify(engine, 0, BUSHY).target)
