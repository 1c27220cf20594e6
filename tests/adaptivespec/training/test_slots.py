"""Many sequences in slots are decoded as each would be alone."""

import pytest
import torch
from torch import Tensor

from adaptivespec.models.decoder import Decoder, Hidden
from adaptivespec.training.slots import Slots
from tests.decoders import greedy, states, tiny_decoder
from tests.factories import ARCHITECTURES, VOCAB_SIZE, Architecture

AUX_LAYERS = (2, 0, 3)


class Text:
    """A sequence in a slot: its prompt, what greedy decoding added, and the states that came."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.prompt = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        self.answer: list[int] = []
        self.final: list[Tensor] = []
        self.aux: list[Tensor] = []


class Decoding:
    """Greedy decoding of texts in slots."""

    def __init__(self, decoder: Decoder, count: int, capacity: int) -> None:
        self._decoder = decoder
        self._slots = Slots(decoder, count, capacity)
        self._next = torch.zeros(count, dtype=torch.int64)
        self._texts: dict[int, Text] = {}

    def fill(self, texts: dict[int, Text]) -> None:
        hidden = self._slots.fill(list(texts), [t.prompt for t in texts.values()], AUX_LAYERS)
        self._texts |= texts
        start = 0
        for slot, text in texts.items():
            self._take(slot, hidden, slice(start, start + len(text.prompt)))
            start += len(text.prompt)

    def advance(self, passes: int) -> None:
        for _ in range(passes):
            hidden = self._slots.advance(self._next, AUX_LAYERS)
            for slot in self._texts:
                self._take(slot, hidden, slice(slot, slot + 1))

    def drop(self, slot: int) -> None:
        del self._texts[slot]

    def _take(self, slot: int, hidden: Hidden, rows: slice) -> None:
        text = self._texts[slot]
        assert hidden.aux is not None
        text.final.append(hidden.final[rows])
        text.aux.append(hidden.aux[rows])
        token = int(self._decoder.logits(hidden.final[rows][-1:]).argmax())
        text.answer.append(token)
        self._next[slot] = token


def assert_as_alone(decoder: Decoder, text: Text) -> None:
    assert text.answer == greedy(decoder, text.prompt, len(text.answer))
    expected = states(decoder, text.prompt + text.answer[:-1], AUX_LAYERS)
    final = torch.cat(text.final)
    close(final, expected.final)
    close(torch.cat(text.aux), expected.aux)
    close(decoder.logits(final), decoder.logits(expected.final))


def close(ours: Tensor, theirs: Tensor | None) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sequences_of_any_length_come_and_go(architecture: Architecture) -> None:
    decoder = tiny_decoder(architecture, num_hidden_layers=4)
    decoding = Decoding(decoder, count=5, capacity=192)
    texts = [Text(length, seed) for seed, length in enumerate((5, 54, 17, 1, 9))]
    short, long, middle, single, late = texts
    decoding.fill({3: short, 0: long, 1: middle})  # slots 2 and 4 are free
    decoding.advance(8)
    decoding.drop(1)
    decoding.fill({1: single})
    decoding.advance(8)
    longest = Text(131, seed=5)
    decoding.drop(3)
    decoding.fill({3: longest, 4: late})
    decoding.advance(9)
    for text in (*texts, longest):
        assert_as_alone(decoder, text)


def test_a_slot_may_be_filled_up_to_its_capacity() -> None:
    decoder = tiny_decoder(num_hidden_layers=4)
    decoding = Decoding(decoder, count=2, capacity=24)
    text = Text(20, seed=0)
    decoding.fill({1: text})
    decoding.advance(4)
    assert_as_alone(decoder, text)


def test_a_free_slot_does_not_disturb_the_others_when_it_is_full() -> None:
    decoder = tiny_decoder(num_hidden_layers=4)
    decoding = Decoding(decoder, count=2, capacity=24)
    decoding.fill({0: Text(20, seed=0), 1: (text := Text(3, seed=1))})
    decoding.drop(0)
    decoding.advance(20)  # far beyond the room of slot 0
    decoding.fill({0: (again := Text(6, seed=2))})
    decoding.advance(1)
    for sequence in (text, again):
        assert_as_alone(decoder, sequence)
