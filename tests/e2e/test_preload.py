"""
Reading ahead with a real vLLM: what requests that wait in its queue get, and what they leave behind.

One engine serves all tests, without vLLM's own prefix cache, so that whatever it does not compute came from the pool;
it schedules by priority. Two requests fill it: with both seats taken, others wait. Slow devices are made slow by the
pool's I/O workers.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from kvpool.client import admin
from kvpool.health import facts
from kvpool.wire.messages import ResizeState
from tests.e2e.answers import CHUNK, Prompts, Reference, Scene, StartEngine, chunks, loadable, tokens
from tests.e2e.pool import Pool, altered, wait_until
from tools.engine_process import Answer, Engine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

#: Five chunks each.
STORED = {name: tokens(800 + index, 1300) for index, name in enumerate(("a", "b", "c", "d"))}
#: Eight blocks each, and ten with their answers.
GROWING = {name: tokens(820 + index, 1000) for index, name in enumerate(("x", "y"))}
GROWN_TOKENS = 200
SEATS = 2
#: 17 of these can be used: two growing requests do not fit to their ends.
GPU_BLOCKS = 18
MIB = 1 << 20
#: Bytes of a chunk of the tiny model in float32.
OBJECT_BYTES = CHUNK * 4 * 2 * 4 * 32 * 4
#: A stored prompt takes 1.25 s to read.
SLOW = {"read_bytes_per_s": 4 << 20}


@contextmanager
def full(engine: Engine) -> Iterator[None]:
    """Both seats are taken by requests that only decode, until the end of the block."""
    seats = {f"seat-{index}": tokens(900 + index, 8) for index in range(SEATS)}
    engine.submit_all(seats, 900)
    for name in seats:
        engine.wait_first(name)
    yield
    assert [] == [name for name in seats if engine.answered(name)], "the seats were free too early"
    for name in seats:
        engine.abort(name)
    for name in seats:
        engine.wait(name)


class Queue(Scene):
    """
    A scene whose prompts wait in the full engine until everything was read ahead for them.

    Attributes:
        read, resident: Objects read from the device, and found in staging by loads, in the last :meth:`fresh`.
    """

    read = resident = 0

    def fresh_of(self, make: Callable[[int], Prompts]) -> tuple[Prompts, dict[str, Answer]]:
        """See :class:`Scene`."""

        def ask(attempt: int) -> tuple[Prompts, dict[str, Answer]]:
            prompts = make(attempt)
            external, before = self.engine.external_tokens(), self.counts()
            with full(self.engine):
                self.engine.submit_all(prompts)
                self.wait_landed(before["landed"] + len(prompts))
            answers = {name: self.engine.wait(name) for name in prompts}
            self.external = self.engine.external_tokens() - external
            after = self.counts()
            self.read, self.resident = after["read"] - before["read"], after["resident"] - before["resident"]
            return prompts, answers

        return self.in_time(ask)

    def counts(self) -> dict[str, int]:
        """Return what the pool has counted."""
        return {
            "read": self.pool.total(facts.BYTES_LOADED) // OBJECT_BYTES,
            "resident": self.pool.total(facts.LOADS_RESIDENT),
            "ahead": self.pool.total(facts.PRELOAD_READS),
            "landed": self.pool.fact(facts.PRELOAD_LANDED_TOTAL),
        }

    def wait_landed(self, count: int) -> None:
        """Return once so many admissions have landed since the pool's start."""
        wait_until(lambda: self.pool.fact(facts.PRELOAD_LANDED_TOTAL) >= count, "everything is read ahead")

    def nothing_left(self) -> bool:
        """Say whether nothing is kept, in flight, queued or pinned for anybody."""
        kept = (facts.PRELOAD_ADMISSIONS, facts.PRELOAD_WAITING, facts.PRELOAD_PROTECTED_BYTES)
        return self.pool.idle() and not any(self.pool.fact(name) for name in kept)


@pytest.fixture(scope="module")
def scene(
    engines: StartEngine, reference: Reference, pools: list[Pool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Queue]:
    pool = Pool(tmp_path_factory.mktemp("preload"), enable_preload=True, preload_lookahead_requests=4)
    pools.append(pool)
    pool.start()
    engine = engines(
        "llama", name="preload", connector=pool.connector(), enable_prefix_caching=False, max_num_seqs=SEATS,
        scheduling_policy="priority", num_gpu_blocks_override=GPU_BLOCKS, max_model_len=2048,
        max_num_batched_tokens=2048,
    )  # fmt: skip
    reference.prepare("llama")
    with engine:
        engine.wait_up()
        pool.wait_clients(2)
        scene = Queue(pool, engine, reference)
        scene.store(STORED)
        yield scene


def loads_of(names: str) -> dict[str, int]:
    """Return what is loaded of stored prompts."""
    return {name: loadable(STORED[name]) for name in names}


def stored(names: str) -> Prompts:
    """Return stored prompts by their names of one letter."""
    return {name: STORED[name] for name in names}


def test_the_objects_of_waiting_requests_are_read_once_before_their_loads_without_vllms_prefix_cache(
    scene: Queue,
) -> None:
    scene.check(stored("ab"), loads_of("ab"))
    objects = sum(chunks(prompt) for prompt in stored("ab").values())
    assert (objects, objects) == (scene.read, scene.resident)
    wait_until(scene.nothing_left, "nothing is kept for requests that have ended")
    scene.check_control(stored("ab"), loads_of("ab"))


def test_fifty_waiting_requests_of_one_prefix_read_it_once(scene: Queue) -> None:
    # Those behind the fourth are not looked at while they wait; what the others have read is there for them.
    before = scene.counts()
    ends = {f"end-{index}": [*STORED["a"][:1280], *tokens(1000 + index, 20)] for index in range(50)}
    with full(scene.engine):
        scene.engine.submit_all(ends, 1)
        scene.wait_landed(before["landed"] + 4)
    answers = {name: scene.engine.wait(name) for name in ends}
    assert dict.fromkeys(ends, 1280) == {name: answer.cached for name, answer in answers.items()}
    assert 5 == scene.counts()["read"] - before["read"]


def test_metrics_say_what_was_served_and_from_where(scene: Queue) -> None:
    before = metrics(scene.engine)
    scene.check(stored("a"), loads_of("a"))
    names = ("served_tokens_total", "served_bytes_total")
    labels = (("device", "d0"), ("tier", "memory"))
    expected = [loadable(STORED["a"]), chunks(STORED["a"]) * OBJECT_BYTES]

    def told() -> list[float]:
        now = metrics(scene.engine)
        return [now.get((name, labels), 0) - before.get((name, labels), 0) for name in names]

    wait_until(lambda: told() == expected, f"tokens and bytes served from memory are {expected}")
    now = metrics(scene.engine)
    assert 0 < now["staging_bytes", (("device", "d0"),)] <= 256 << 20
    assert 1 == now["device_healthy", (("device", "d0"),)] == now["connected", ()]
    assert (
        sum(chunks(prompt) for prompt in STORED.values()) * OBJECT_BYTES
        <= (now["stored_bytes_total", (("device", "d0"),)])
    )


def test_a_request_aborted_while_it_is_read_ahead_leaves_nothing(scene: Queue) -> None:
    scene.restart(faults=SLOW)
    with full(scene.engine):
        scene.engine.submit("aborted", STORED["a"])
        wait_until(lambda: scene.pool.total(facts.IN_FLIGHT_READS), "its objects are being read")
        assert scene.pool.fact(facts.PRELOAD_ADMISSIONS)
        scene.engine.abort("aborted")
        assert [] == scene.engine.wait("aborted").tokens
        wait_until(scene.nothing_left, "nothing is kept for it")
    assert 0 == scene.counts()["landed"]
    scene.restart()
    scene.check_with_control(stored("a"), loads_of("a"))


def test_a_request_that_finishes_without_its_objects_leaves_nothing(scene: Queue) -> None:
    before = scene.counts()
    with full(scene.engine):
        scene.engine.submit("alone", STORED["b"], transfer={"max_load_tokens": 0})
        scene.wait_landed(before["landed"] + 1)
    answer = scene.engine.wait("alone")
    assert (0, scene.reference.answer(STORED["b"])) == (answer.cached, answer.tokens)
    wait_until(scene.nothing_left, "nothing is kept for it")
    assert chunks(STORED["b"]) == scene.counts()["read"] - before["read"]


def test_a_request_that_runs_before_everything_is_there_shares_the_reads_under_way(scene: Queue) -> None:
    scene.restart(faults=SLOW)

    def ask(_: int) -> tuple[Answer, Mapping[str, int]]:
        before = scene.counts()
        with full(scene.engine):
            scene.engine.submit("early", STORED["c"])
            wait_until(lambda: scene.pool.total(facts.IN_FLIGHT_READS), "its objects are being read")
        answer = scene.engine.wait("early")
        after = scene.counts()
        return answer, {name: after[name] - before[name] for name in after}

    answer, did = scene.in_time(ask)
    assert (loadable(STORED["c"]), scene.reference.answer(STORED["c"])) == (answer.cached, answer.tokens)
    assert (chunks(STORED["c"]), chunks(STORED["c"])) == (did["read"], did["ahead"])
    assert chunks(STORED["c"]) > did["resident"]
    scene.check_control(stored("c"), loads_of("c"))


def test_objects_are_read_in_the_order_of_priorities_not_of_arrival(scene: Queue) -> None:
    scene.restart(faults=SLOW, device={"iodepth": 1, "open_lookahead": 1})

    def ask(_: int) -> tuple[dict[str, Answer], list[str], int]:
        before = scene.counts()
        with full(scene.engine):
            scene.engine.submit_all(stored("bcd"), priorities={"b": 3, "c": 2, "d": 1})
            scene.wait_landed(before["landed"] + 1)
            resident = before["resident"]
        scene.engine.wait_first("d")
        waiting = [name for name in "bc" if not scene.engine.answered(name)]
        ready = scene.counts()["resident"] - resident
        return {name: scene.engine.wait(name) for name in "bcd"}, waiting, ready

    answers, waiting, ready = scene.in_time(ask)
    assert ["b", "c"] == waiting
    assert chunks(STORED["d"]) <= ready
    assert scene.reference.answers(stored("bcd")) == {name: answer.tokens for name, answer in answers.items()}
    assert loads_of("bcd") == {name: answer.cached for name, answer in answers.items()}
    scene.restart(device={})
    scene.check_control(stored("bcd"), loads_of("bcd"))


def test_a_preempted_request_is_read_ahead_again_and_loads_what_it_lost(scene: Queue) -> None:
    def grow(_: int) -> tuple[dict[str, Answer], float, int]:
        preempted, before = scene.engine.counters()["vllm:num_preemptions"], scene.counts()
        answers = scene.engine.generate(GROWING, GROWN_TOKENS)
        counts = scene.engine.counters()["vllm:num_preemptions"] - preempted
        return answers, counts, scene.counts()["ahead"] - before["ahead"]

    scene.store(GROWING)
    expected = {name: scene.reference.answer(prompt, GROWN_TOKENS) for name, prompt in GROWING.items()}
    answers, preempted, ahead = scene.in_time(grow)
    assert expected == {name: answer.tokens for name, answer in answers.items()}
    assert preempted >= 1
    assert ahead >= 3
    wait_until(scene.nothing_left, "nothing is kept for requests that have ended")
    scene.pool.stop()
    with altered(scene.pool):
        scene.start(verify=False)
        wrong, preempted, _ = scene.in_time(grow)
        scene.pool.stop()
    scene.start(verify=True)
    assert preempted >= 1
    assert [] == [name for name, answer in wrong.items() if answer.tokens == expected[name]]


def test_what_staging_keeps_is_served_after_its_files_were_deleted(scene: Queue) -> None:
    scene.restart(staging_cache="lru")
    assert scene.reference.answers(stored("a")) == _after_deletion(scene)
    scene.pool.stop()
    with altered(scene.pool):
        scene.start(verify=False)
        wrong = _after_deletion(scene)
        scene.pool.stop()
    scene.start(verify=True, staging_cache="off")
    assert scene.reference.answers(stored("a")) != wrong


def test_staging_grows_and_shrinks_while_requests_run(scene: Queue) -> None:
    expected = scene.reference.answers(stored("abcd"))
    loaded = 0
    for size in (384 * MIB, 96 * MIB, 256 * MIB):
        with ThreadPoolExecutor() as threads:
            states: list[ResizeState] = []
            resizing = threads.submit(admin.resize, str(scene.pool.run_dir), size, timeout_s=60, told=states.append)
            last = False
            while not last:
                last = resizing.done()
                answers = scene.engine.generate(stored("abcd"))
                assert expected == {name: answer.tokens for name, answer in answers.items()}
                loaded += sum(answer.cached for answer in answers.values())
            resizing.result()
        assert states[-1].done
        assert (size, 0) == (scene.pool.fact(facts.STAGING_BYTES), scene.pool.fact(facts.STAGING_CHANGING))
    assert loaded
    scene.check_control(stored("a"), loads_of("a"))


@pytest.mark.long
def test_two_engines_share_what_is_read_ahead_and_one_killed_with_pinned_slots_harms_nobody(
    scene: Queue, engines: StartEngine
) -> None:
    scene.restart(faults=SLOW)
    beside = engines("llama", name="beside", connector=scene.pool.connector(), max_model_len=2048).wait_up()
    scene.pool.wait_clients(4)
    read = scene.counts()["read"]
    with full(scene.engine):
        scene.engine.submit("here", STORED["a"])
        beside.submit("there", STORED["a"])
    answers = [scene.engine.wait("here"), beside.wait("there")]
    assert [scene.reference.answer(STORED["a"])] * 2 == [answer.tokens for answer in answers]
    assert [loadable(STORED["a"])] * 2 == [answer.cached for answer in answers]
    assert chunks(STORED["a"]) == scene.counts()["read"] - read

    rank = next(pid for pid in beside.tree() if "VLLM::Worker" in " ".join(psutil.Process(pid).cmdline()))
    beside.submit("killed", STORED["b"])
    wait_until(lambda: scene.pool.total(facts.IN_FLIGHT_READS), "its objects are being read")
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: scene.pool.total(facts.SLOTS_PINNED), "slots are pinned for a rank that stands still")
    beside.kill_tree()
    wait_until(scene.nothing_left, "nothing is kept or pinned for the dead")
    scene.restart()
    scene.check_with_control(stored("bc"), loads_of("bc"))


def _after_deletion(scene: Queue) -> dict[str, list[int]]:
    """Load a prompt, delete its files, and load it again without a read; the files are back afterwards."""
    scene.fresh(stored("a"))
    files = {path: path.read_bytes() for path in scene.objects_of["a"]}
    for path in files:
        path.unlink()
    before = scene.counts()
    answer = scene.engine.ask(STORED["a"])
    after = scene.counts()
    for path, content in files.items():
        path.write_bytes(content)
    assert loadable(STORED["a"]) == answer.cached
    assert (0, chunks(STORED["a"])) == (after["read"] - before["read"], after["resident"] - before["resident"])
    return {"a": answer.tokens}


def metrics(engine: Engine) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return kvpool's values of the engine's `/metrics`, by name and labels but vLLM's own."""
    found = {}
    for name, labels, value in re.findall(r"^vllm:kvpool_(\w+)\{(.*?)\} (\S+)$", engine.metrics(), re.MULTILINE):
        pairs = re.findall(r'(\w+)="(.*?)"', labels)
        found[name, tuple(sorted(pair for pair in pairs if pair[0] not in ("engine", "model_name")))] = float(value)
    return found
