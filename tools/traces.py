"""
Request traces: the JSONL form, a converter for block-hash traces, a seeded generator.

Theory. A line is one request: when it arrives, the hashes of its whole prompt chunks in order, its prompt and output
tokens. A chunk's hash stands for everything up to its end, as vLLM's do, so equal hashes mean equal prefixes.

The generator draws sessions: chats that grow turn by turn, questions on long documents, prompts that come once, all
behind a few shared system prompts. Arrivals are Poisson, one a second; :func:`at_rate` stretches them.

Does not cover: what happens to the requests (`trace_world.py`).
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: Tokens of a chunk in the generator.
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Request:
    """
    One request of a trace.

    Attributes:
        arrival_s: Seconds from the trace's start.
        tokens: Of the prompt.
        chunks: Hashes of its whole chunks, in order.
        output_tokens: Generated.
    """

    arrival_s: float
    tokens: int
    chunks: tuple[int, ...]
    output_tokens: int


def read_trace(path: Path) -> list[Request]:
    """Read JSONL as :func:`write_trace` writes it, in order of arrival."""
    with path.open(encoding="utf-8") as lines:
        found = [
            Request(line["arrival_s"], line["tokens"], tuple(line["chunks"]), line.get("output_tokens", 1))
            for line in map(json.loads, lines)
        ]
    return sorted(found, key=lambda request: request.arrival_s)


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as stream:
        for request in requests:
            line = {
                "arrival_s": round(request.arrival_s, 6),
                "tokens": request.tokens,
                "chunks": list(request.chunks),
                "output_tokens": request.output_tokens,
            }
            stream.write(json.dumps(line) + "\n")


def convert_block_hashes(
    lines: Iterable[str], *, block_tokens: int, chunk_tokens: int = CHUNK_TOKENS
) -> Iterator[Request]:
    """
    Turn a public block-hash trace into requests.

    Args:
        lines: JSON objects with `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids` (one for each
            block of the prompt, the last one perhaps partial), as the Mooncake traces have them.
        block_tokens: Tokens of a block there (512 in those).
        chunk_tokens: Tokens of a chunk here: a part, or a multiple, of a block.
    """
    for line in lines:
        row: dict[str, Any] = json.loads(line)
        tokens, blocks = int(row["input_length"]), row["hash_ids"]
        chunks, before = [], b""
        for chunk in range(tokens // chunk_tokens):
            last = min((chunk * chunk_tokens + chunk_tokens - 1) // block_tokens, len(blocks) - 1)
            before = hashlib.blake2b(f"{blocks[last]}/{chunk}".encode() + before, digest_size=6).digest()
            chunks.append(int.from_bytes(before, "big"))
        yield Request(row["timestamp"] / 1000, tokens, tuple(chunks), max(1, int(row.get("output_length", 1))))


def at_rate(requests: Iterable[Request], requests_per_s: float) -> list[Request]:
    """Stretch a trace of one request a second to another rate."""
    return [replace(request, arrival_s=request.arrival_s / requests_per_s) for request in requests]


# ------------------------------------------------------------ the generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """
    What is drawn.

    Attributes:
        chats, documents: Shares of arrivals; the rest comes once.
        chat_tokens, document_tokens, once_tokens: (least, most) prompt tokens.
        turn_tokens: New tokens of a turn, the last answer among them.
        question_tokens: Of a question on a document.
        chats_open, documents_open: Sessions that go on side by side.
        questions: Questions on one document, mean.
        system_prompts, system_tokens: How many shared beginnings of chats and one-off prompts, and their length.
        output_tokens: (least, most).
    """

    chats: float = 0.5
    documents: float = 0.25
    chat_tokens: tuple[int, int] = (2_000, 30_000)
    document_tokens: tuple[int, int] = (30_000, 90_000)
    once_tokens: tuple[int, int] = (500, 8_000)
    turn_tokens: tuple[int, int] = (300, 4_000)
    question_tokens: tuple[int, int] = (30, 400)
    chats_open: int = 24
    documents_open: int = 6
    questions: float = 8.0
    system_prompts: int = 4
    system_tokens: int = 400
    output_tokens: tuple[int, int] = (50, 400)


@dataclass(slots=True)
class _Session:
    """A chat or a document: its chunks so far, and how it goes on."""

    name: int
    tokens: int
    end: int


def synthetic(requests: int, seed: int, mix: Mix | None = None) -> list[Request]:
    """Return a trace of *requests* requests, one a second on average; the same for the same seed."""
    mix = mix or Mix()
    chance = random.Random(seed)
    names = iter(range(1, 1 << 40))
    chats = [_chat(chance, mix, next(names), anywhere=True) for _ in range(mix.chats_open)]
    documents = [_document(chance, mix, next(names)) for _ in range(mix.documents_open)]
    arrival_s, found = 0.0, []
    for _ in range(requests):
        arrival_s += chance.expovariate(1.0)
        kind = chance.random()
        if kind < mix.chats:
            session = _next_turn(chance, mix, chats, names)
            tokens = session.tokens
        elif kind < mix.chats + mix.documents:
            session, tokens = _next_question(chance, mix, documents, names)
        else:
            session = _Session(next(names), 0, 0)
            tokens = chance.randint(*mix.once_tokens)
        output = chance.randint(*mix.output_tokens)
        found.append(Request(arrival_s, tokens, _chunks(session, tokens, mix, next(names)), output))
    return found


def _chat(chance: random.Random, mix: Mix, name: int, *, anywhere: bool) -> _Session:
    least, most = mix.chat_tokens
    start = chance.randint(least, most if anywhere else min(most, 2 * least))
    return _Session(name, start - mix.turn_tokens[0], chance.randint(start, most))


def _next_turn(chance: random.Random, mix: Mix, chats: list[_Session], names: Iterator[int]) -> _Session:
    place = chance.randrange(len(chats))
    chat = chats[place]
    chat.tokens += chance.randint(*mix.turn_tokens)
    if chat.tokens > chat.end:
        chats[place] = chat = _chat(chance, mix, next(names), anywhere=False)
        chat.tokens += mix.turn_tokens[0]
    return chat


def _document(chance: random.Random, mix: Mix, name: int) -> _Session:
    return _Session(name, chance.randint(*mix.document_tokens), 0)


def _next_question(
    chance: random.Random, mix: Mix, documents: list[_Session], names: Iterator[int]
) -> tuple[_Session, int]:
    place = chance.randrange(len(documents))
    if chance.random() < 1 / mix.questions:
        documents[place] = _document(chance, mix, next(names))
    document = documents[place]
    return document, min(document.tokens + chance.randint(*mix.question_tokens), mix.document_tokens[1])


def _chunks(session: _Session, tokens: int, mix: Mix, once: int) -> tuple[int, ...]:
    """Hashes: of the system prompt, the session's own, and what comes *once*; a partial chunk has none."""
    shared = mix.system_tokens // CHUNK_TOKENS
    system = -(1 + session.name % mix.system_prompts)
    count = tokens // CHUNK_TOKENS
    known = min(count, session.tokens // CHUNK_TOKENS)
    return (
        *(system * 1_000 - index for index in range(min(shared, count))),
        *(session.name << 20 | index for index in range(shared, known)),
        *(once << 20 | index for index in range(max(shared, known), count)),
    )
