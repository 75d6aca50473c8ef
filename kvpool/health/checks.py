"""
What the facts of a pool mean for the one who runs it: findings, each with one sentence what to do.

Theory. A check is a pure function from a :class:`Picture` (pool facts and process rows, names in
`facts`) to findings; it is registered by its decorator and knows nothing of the others. A fact that
is absent is not known, and what is not known is never a finding. A finding either degrades the pool
(exit code 1) or is a note for the reader (exit code stays 0).

Covers: the checks and the verdict. Does not cover: gathering facts, printing findings.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvpool.health import facts
from kvpool.health.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """
    Something the reader should know.

    Attributes:
        check: Name of the check that found it.
        subject: `pool`, or role and device (or engine and rank) of the process it is about.
        what: What is the case, with the figures.
        advice: One sentence: what to do.
        degrades: True: the pool is not as it should be; False: good to know.
    """

    check: str
    subject: str
    what: str
    advice: str
    degrades: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """The facts of one moment: the pool's own, and one row per process and attached client."""

    pool: Facts
    rows: list[Facts]

    def of(self, role: str) -> list[Facts]:
        """Return the rows of one role, in order."""
        return [row for row in self.rows if row.get(facts.ROLE) == role]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check yields: a finding without the check's name, which the registry adds."""

    subject: str
    what: str
    advice: str
    degrades: bool = True


Check = Callable[[Picture], Iterable[Found]]

#: Every check by its name, in the order of this file.
CHECKS: dict[str, Check] = {}

#: Below this share of a file system's size, free space is worth a finding.
SPACE_FREE_SHARE_MIN = 0.02
#: A worker that was started again within this time is not taken for stable yet.
RESTART_SETTLED_S = 60.0
#: Above this share of the offered objects, dropped stores are worth a finding.
STORES_DROPPED_SHARE_MAX = 0.05
#: Above this share of the requests, objects given up unused are worth a note.
PRELOAD_EXPIRED_SHARE_MAX = 0.1
#: Above this share of what was read ahead, what went unused is worth a note.
EVICTED_BEFORE_USE_SHARE_MAX = 0.02
#: A device that published this much without one load is taken for write-only.
WRITE_ONLY_BYTES = 16 << 30
#: An engine that gave this much, and got less than that share of it back, writes for nothing.
SERVES_LITTLE_BYTES = 64 << 30
SERVED_SHARE_MIN = 0.01


def check(function: Check) -> Check:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


def findings_of(picture: Picture) -> list[Finding]:
    """Run every check over *picture*."""
    return [
        Finding(check=name, subject=found.subject, what=found.what, advice=found.advice, degrades=found.degrades)
        for name, function in CHECKS.items()
        for found in function(picture)
    ]


def subject_of(row: Facts) -> str:
    """Return how a row is called in a finding: `io_worker nvme0`, `rank 1 of engine-7`, `coordinator`."""
    role = str(row.get(facts.ROLE, "process"))
    if facts.DEVICE in row:
        return f"{role} {row[facts.DEVICE]}"
    if role == facts.RANK_CLIENT:
        return f"rank {row.get(facts.RANK, '?')} of {row.get(facts.ENGINE, '?')}"
    if role == facts.SCHEDULER_CLIENT:
        return f"scheduler of {row.get(facts.ENGINE, '?')}"
    return role


def number(row: Facts, name: str) -> float:
    """Return a fact as a number, 0 where it is not known."""
    value = row.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def gib(count: float) -> str:
    """Return bytes as GiB for a sentence."""
    return f"{count / 2**30:.2f} GiB"


# ---------------------------------------------------------------- processes


@check
def worker_down(picture: Picture) -> Iterator[Found]:
    """A device without a running worker serves nothing."""
    for row in picture.of(facts.IO_WORKER):
        if row.get(facts.STATE) == facts.DOWN:
            what = f"its process is not running (restarts so far: {number(row, facts.RESTARTS):.0f})"
            advice = (
                "Look into the coordinator's log for how it ended; it is started again by itself with growing pauses."
            )
            yield Found(subject_of(row), what, advice)


@check
def worker_absent(picture: Picture) -> Iterator[Found]:
    """Every configured device has its row."""
    missing = number(picture.pool, facts.DEVICES) - len(picture.of(facts.IO_WORKER))
    if missing > 0:
        advice = "Compare the devices of the configuration with the rows and look into the coordinator's log."
        yield Found("pool", f"{missing:.0f} configured device(s) have no I/O worker", advice)


@check
def process_silent(picture: Picture) -> Iterator[Found]:
    """A process that does not answer is stopped or overloaded."""
    for row in picture.rows:
        if row.get(facts.STATE) == facts.SILENT:
            pid = row.get(facts.PID, "?")
            advice = f"See what process {pid} does (state T means stopped: kill -CONT {pid}); a hung device shows as D."
            yield Found(subject_of(row), "it did not answer in time", advice)


@check
def worker_restarted(picture: Picture) -> Iterator[Found]:
    """Restarts: degraded while they are fresh, a note when the worker has been running since."""
    for row in picture.of(facts.IO_WORKER):
        restarts, uptime_s = number(row, facts.RESTARTS), number(row, facts.UPTIME_S)
        if restarts and row.get(facts.STATE) != facts.DOWN:
            what = f"it was started again {restarts:.0f} time(s), the last {uptime_s:.0f} s ago"
            advice = "Look into the coordinator's log and the kernel's (dmesg) for why it ended."
            yield Found(subject_of(row), what, advice, degrades=uptime_s < RESTART_SETTLED_S)


# ---------------------------------------------------------------- devices


@check
def io_fallback(picture: Picture) -> Iterator[Found]:
    """The I/O mode is the best that kvpool has."""
    for row in picture.of(facts.IO_WORKER):
        if row.get(facts.IO_DEGRADED):
            advice = "Run it on a kernel, container profile and file system that allow io_uring and O_DIRECT."
            yield Found(subject_of(row), f"I/O mode is {row.get(facts.IO_MODE)}", str(row.get(facts.IO_ADVICE, advice)))


@check
def depth_short(picture: Picture) -> Iterator[Found]:
    """Staging carries the queue depth that was configured."""
    for row in picture.of(facts.IO_WORKER):
        limit, possible = number(row, facts.DEPTH_LIMIT), number(row, facts.DEPTH_POSSIBLE)
        if facts.DEPTH_POSSIBLE in row and possible < limit and number(row, facts.SLOT_SIZES):
            what = f"staging carries {possible:.0f} of the {limit:.0f} reads and writes in flight that are configured"
            advice = "Raise `staging` in [pool], or lower `iodepth` of this device."
            yield Found(subject_of(row), what, advice)


@check
def breaker_open(picture: Picture) -> Iterator[Found]:
    """The device is in use."""
    for row in picture.of(facts.IO_WORKER):
        state = row.get(facts.BREAKER, facts.BREAKER_CLOSED)
        if state != facts.BREAKER_CLOSED:
            advice = "Check the drive (dmesg, smartctl); it is tried by itself and comes back when it answers."
            why = row.get(facts.BREAKER_WHY, "repeated failures")
            yield Found(subject_of(row), f"given up for now after {why} (breaker {state})", advice)


@check
def corrupt_objects(picture: Picture) -> Iterator[Found]:
    """Every object read is the one that was published."""
    for row in picture.of(facts.IO_WORKER):
        corrupt = number(row, facts.errors("CORRUPT")) or number(row, facts.SET_ASIDE)
        if corrupt:
            advice = "The bytes were refused, not served; check the drive and the memory, and who else writes there."
            yield Found(subject_of(row), f"{corrupt:.0f} object(s) were not what had been stored", advice)


@check
def device_errors(picture: Picture) -> Iterator[Found]:
    """The device neither refuses reads nor writes."""
    for row in picture.of(facts.IO_WORKER):
        reads, writes = number(row, facts.errors("READ_ERROR")), number(row, facts.errors("WRITE_ERROR"))
        if reads or writes:
            advice = "Look for the drive in the kernel's log (dmesg) and its own (smartctl -a)."
            yield Found(subject_of(row), f"{reads:.0f} read and {writes:.0f} write error(s)", advice)


@check
def operations_late(picture: Picture) -> Iterator[Found]:
    """Operations end within their deadline."""
    for row in picture.of(facts.IO_WORKER):
        late = number(row, facts.errors("DEADLINE"))
        if late:
            advice = "Compare the drive's speed (kvpool bench) with its data sheet, or raise the deadlines in [pool]."
            yield Found(subject_of(row), f"{late:.0f} object(s) passed their deadline", advice)


@check
def space_short(picture: Picture) -> Iterator[Found]:
    """There is room to store."""
    for row in picture.of(facts.IO_WORKER):
        total, free = number(row, facts.SPACE_TOTAL_BYTES), number(row, facts.SPACE_FREE_BYTES)
        refused = number(row, facts.errors("DEVICE_FULL"))
        if row.get(facts.STORING) is False and row.get(facts.STORING_WHY) != facts.STORES_TURNED_OFF:
            what = f"no stores are taken: {row.get(facts.STORING_WHY, 'there is no room')} ({gib(free)} free)"
            advice = "Raise `capacity` or lower `min_free` of this device, or make room on its drive; loads go on."
            yield Found(subject_of(row), what, advice)
        elif refused or (facts.SPACE_FREE_BYTES in row and free < SPACE_FREE_SHARE_MIN * total):
            what = f"{gib(free)} free of {gib(total)}, {refused:.0f} object(s) refused for lack of space"
            advice = f"Make room on the file system of {row.get(facts.DEVICE_PATH, 'this device')}; loads go on."
            yield Found(subject_of(row), what, advice)


@check
def stores_off(picture: Picture) -> Iterator[Found]:
    """Nobody has turned stores off."""
    if picture.pool.get(facts.STORES_ON) is False:
        advice = "`kvpool stores on` turns them on again; what is stored is loaded as before."
        yield Found("pool", "stores are turned off", advice, degrades=False)


@check
def stores_dropped(picture: Picture) -> Iterator[Found]:
    """Most of what is offered is stored."""
    for row in picture.of(facts.IO_WORKER):
        dropped = number(row, facts.STORES_DROPPED) - number(row, facts.STORES_DROPPED_OFF)
        stored = number(row, facts.STORES)
        if dropped > STORES_DROPPED_SHARE_MAX * (dropped + stored):
            what = f"{dropped:.0f} of {dropped + stored:.0f} objects offered were dropped"
            advice = "Raise `staging` in [pool] if the drive keeps up on average, or add a device if it does not."
            yield Found(subject_of(row), what, advice)


@check
def write_only(picture: Picture) -> Iterator[Found]:
    """What is written is read some day."""
    for row in picture.of(facts.IO_WORKER):
        stored = number(row, facts.BYTES_STORED)
        if stored >= WRITE_ONLY_BYTES and facts.LOADS in row and not number(row, facts.LOADS):
            advice = (
                "If requests do repeat, compare the engines' namespaces and PYTHONHASHSEED between runs; if they do "
                "not, `kvpool stores off` spares the drive."
            )
            yield Found(subject_of(row), f"{gib(stored)} were stored and nothing was ever loaded", advice)


@check
def serves_little(picture: Picture) -> Iterator[Found]:
    """What engines give comes back to them in some proportion."""
    for row in picture.of(facts.RANK_CLIENT):
        kept, served = number(row, facts.BYTES_KEPT), number(row, facts.BYTES_SERVED)
        if kept >= SERVES_LITTLE_BYTES and served < SERVED_SHARE_MIN * kept:
            advice = (
                "If requests do repeat, see why keys are missed (missed_* of the scheduler); if they do not, "
                "`kvpool stores off` for now, and kvpool_store: false in requests, or kv_role kv_consumer, for good."
            )
            yield Found(subject_of(row), f"{gib(kept)} were stored for {gib(served)} that were loaded", advice)


@check
def self_test_failed(picture: Picture) -> Iterator[Found]:
    """What a rank stores is what it loads: it has moved a pattern to every device and back."""
    for row in picture.of(facts.RANK_CLIENT):
        if row.get(facts.SELF_TEST) == "failed":
            what = f"its round trip at start failed, so it neither stores nor loads: {row.get(facts.SELF_TEST_WHY, '')}"
            advice = "Check memory and drives, run `kvpool fsck`, and start the engine again: it tries anew."
            yield Found(subject_of(row), what, advice)
        elif row.get(facts.SELF_TEST) == "unproven":
            what = f"its round trip at start proved nothing: {row.get(facts.SELF_TEST_WHY, '')}"
            advice = "Start the engine again when the pool is well, if you want the proof."
            yield Found(subject_of(row), what, advice, degrades=False)


@check
def index_building(picture: Picture) -> Iterator[Found]:
    """The index covers the directory."""
    for row in picture.of(facts.IO_WORKER):
        if row.get(facts.INDEX_COMPLETE) is False:
            advice = "Wait; until then keys that are not indexed yet are looked up by name."
            what = f"the index is being built ({number(row, facts.INDEX_OBJECTS):.0f} objects so far)"
            yield Found(subject_of(row), what, advice, degrades=False)


@check
def verification_off(picture: Picture) -> Iterator[Found]:
    """Payloads are verified."""
    for row in picture.of(facts.IO_WORKER):
        if row.get(facts.VERIFY) is False:
            advice = "Set `verify = true` in [pool] unless this is a measurement."
            yield Found(subject_of(row), "payload checksums are not verified", advice, degrades=False)


# ---------------------------------------------------------------- staging


@check
def staging_short(picture: Picture) -> Iterator[Found]:
    """Staging is as large as configured, or on its way there."""
    wanted, ready = number(picture.pool, facts.STAGING_BYTES), number(picture.pool, facts.STAGING_READY_BYTES)
    if facts.STAGING_ADVICE in picture.pool:
        what = f"{gib(ready)} of {gib(wanted)} staging could be made"
        yield Found("pool", what, str(picture.pool[facts.STAGING_ADVICE]))


@check
def staging_changing(picture: Picture) -> Iterator[Found]:
    """Staging stays as it is."""
    pool = picture.pool
    if pool.get(facts.STAGING_CHANGING):
        ready, leaving = number(pool, facts.STAGING_READY_BYTES), number(pool, facts.STAGING_LEAVING_BYTES)
        what = f"staging changes: {gib(ready)} of {gib(number(pool, facts.STAGING_BYTES))} ready"
        if leaving:
            what += f", {gib(leaving)} being taken back"
        advice = "Wait; what is taken back leaves as soon as the jobs that use it have ended."
        yield Found("pool", what, advice, degrades=False)


@check
def preload_crowded(picture: Picture) -> Iterator[Found]:
    """Staging has room for a waiting request."""
    pool = picture.pool
    waiting, refused = number(pool, facts.PRELOAD_WAITING), number(pool, facts.PRELOAD_REFUSED)
    if refused and waiting and facts.PRELOAD_ADMISSIONS in pool and not number(pool, facts.PRELOAD_ADMISSIONS):
        what = f"none of {waiting:.0f} waiting requests fits into what loads and stores leave of staging"
        advice = "Raise `staging` in [pool], or `kvpool resize` it: without room nothing is read ahead."
        yield Found("pool", what, advice, degrades=False)


@check
def preload_expired(picture: Picture) -> Iterator[Found]:
    """What is read ahead is used in time."""
    expired, used = number(picture.pool, facts.PRELOAD_EXPIRED), number(picture.pool, facts.PRELOAD_USED)
    if expired > PRELOAD_EXPIRED_SHARE_MAX * (expired + used):
        what = f"{expired:.0f} of {expired + used:.0f} requests had not started when their objects were given up"
        advice = "Lower `preload_lookahead_requests`, or raise `preload_expiry_s` if requests do wait that long."
        yield Found("pool", what, advice, degrades=False)


@check
def evicted_before_use(picture: Picture) -> Iterator[Found]:
    """What was read ahead stays until it is used."""
    for row in picture.of(facts.IO_WORKER):
        lost, read = number(row, facts.EVICTED_BEFORE_USE), number(row, facts.PRELOAD_READS)
        if lost > EVICTED_BEFORE_USE_SHARE_MAX * read:
            what = f"{lost:.0f} of {read:.0f} objects read ahead went before they were used"
            advice = "Raise `staging` in [pool], or lower `preload_lookahead_requests`: loads take what they need."
            yield Found(subject_of(row), what, advice, degrades=False)


@check
def slots_quarantined(picture: Picture) -> Iterator[Found]:
    """Memory waits for proof only as long as somebody dies."""
    for row in picture.of(facts.IO_WORKER):
        count = number(row, facts.SLOTS_QUARANTINED)
        if count:
            advice = "It comes back when the process that used it is really gone; see which engine was killed."
            yield Found(subject_of(row), f"{count:.0f} slot(s) wait for a proof that nothing touches them", advice)
    segments = number(picture.pool, facts.SEGMENTS_QUARANTINED)
    if segments:
        advice = "It comes back when the dead worker's rings are gone and every engine has ended its copies."
        yield Found("pool", f"{segments:.0f} segment(s) of a dead worker wait for proof", advice)


# ---------------------------------------------------------------- clients


@check
def segments_not_pinned(picture: Picture) -> Iterator[Found]:
    """Ranks copy at full speed."""
    for row in picture.of(facts.RANK_CLIENT):
        mapped, pinned = number(row, facts.SEGMENTS_MAPPED), number(row, facts.SEGMENTS_PINNED)
        if facts.SEGMENTS_PINNED in row and pinned < mapped:
            what = f"{mapped - pinned:.0f} of {mapped:.0f} segments could not be pinned: copies are slow"
            advice = "Raise the locked-memory limit of the engine's process (ulimit -l unlimited, or LimitMEMLOCK)."
            yield Found(subject_of(row), what, advice)


@check
def answers_late(picture: Picture) -> Iterator[Found]:
    """The scheduler gets its answers in time."""
    for row in picture.of(facts.SCHEDULER_CLIENT):
        late = number(row, facts.ANSWERS_LATE)
        if late:
            advice = "Give the coordinator CPU time (see its CPU column and the machine's load)."
            yield Found(subject_of(row), f"{late:.0f} announcement(s) got no answer in time", advice)


@check
def engines_outdated(picture: Picture) -> Iterator[Found]:
    """All engines of a model have reset when one has."""
    names = str(picture.pool.get(facts.ENGINES_OUTDATED, ""))
    if names:
        advice = "Reset the prefix cache of these too, connector included, once their weights are as they should be."
        yield Found("pool", f"after a reset by others these neither load nor store: {names}", advice)


@check
def peers_refused(picture: Picture) -> Iterator[Found]:
    """Only kvpool's own processes, of this user and version, talk to the pool."""
    refused, dropped = number(picture.pool, facts.PEERS_REFUSED), number(picture.pool, facts.PEERS_DROPPED)
    if refused or dropped:
        what = f"{refused:.0f} peer(s) refused, {dropped:.0f} dropped since they did not read"
        advice = "The coordinator's log names each with its reason; engines must run the same kvpool version."
        yield Found("pool", what, advice, degrades=bool(dropped))
