"""
Names of the facts that processes tell about themselves, with one line of meaning each.

Covers: the keys of `Report.facts`, `Health.pool` and the rows of `Health.rows` (flat, JSON-ready),
and the closed sets of values that some of them have.
Does not cover: how facts are gathered (`process_facts` and the processes themselves), what they
mean for the user (`checks`), how they look (`render`).

A process tells what it knows and leaves out what it does not; a reader treats an absent fact as
"not known". Counters count from the start of their process and never fall. Names are append-only.
"""

#: A fact's value, and the facts of one process or of the pool, as they cross processes.
Value = str | int | float | bool
Facts = dict[str, Value]

#: Meaning of every fact, for documentation; errors come as `errors_<code>` (see :func:`errors`).
MEANING: dict[str, str] = {}


def _fact(name: str, meaning: str) -> str:
    MEANING[name] = meaning
    return name


# ---------------------------------------------------------------- values of closed sets

COORDINATOR, IO_WORKER, RANK_CLIENT, SCHEDULER_CLIENT = "coordinator", "io_worker", "rank", "scheduler"
STARTING, RUNNING, DRAINING, DOWN, SILENT = "starting", "running", "draining", "down", "silent"
BREAKER_CLOSED, BREAKER_OPEN, BREAKER_PROBING = "closed", "open", "probing"

# ---------------------------------------------------------------- every row

ROLE = _fact("role", "coordinator, io_worker, rank, scheduler")
PID = _fact("pid", "process id as the process itself sees it")
STATE = _fact("state", "starting, running, draining, down (no process now), silent (owed an answer and gave none)")
UPTIME_S = _fact("uptime_s", "seconds since the process began")
QUEUE_MESSAGES = _fact("queue_messages", "messages waiting in this process to be read by its peers")

# measured from outside by whoever asks for the health (process_facts.py)
CPU_PERCENT = _fact("cpu_percent", "user and system time over the sampling interval, percent of one core")
CPU_S = _fact("cpu_s", "user and system seconds since the process began")
MEMORY_BYTES = _fact("memory_bytes", "resident memory without shared memory (staging is counted once, in the pool)")
DESCRIPTORS = _fact("descriptors", "open file descriptors")
THREADS = _fact("threads", "threads, the kernel's io_uring workers among them")
READ_BYTES = _fact("read_bytes", "bytes the process had fetched from storage (/proc/PID/io)")
WRITTEN_BYTES = _fact("written_bytes", "bytes the process had sent to storage (/proc/PID/io)")

# ---------------------------------------------------------------- rows of one device's I/O worker

DEVICE = _fact("device", "name of the device")
DEVICE_PATH = _fact("device_path", "directory of the device")
RESTARTS = _fact("restarts", "times the coordinator had to start this process again")
WORKER_GENERATION = _fact("worker_generation", "number of this run of the device's worker")
IO_MODE = _fact("io_mode", "effective I/O mode, in the engine's words")
IO_DEGRADED = _fact("io_degraded", "True: the mode is a fallback (no io_uring, plain buffers, or no O_DIRECT)")
IO_ADVICE = _fact("io_advice", "with io_degraded: what to set so that the full mode is possible")
VERIFY = _fact("verify", "True: payload checksums are verified when an object becomes resident")

QUEUE_LOAD = _fact("queue_load", "objects that loads wait for and that have no open or read in flight yet")
QUEUE_STORE = _fact("queue_store", "filled objects that wait to be written")
IN_FLIGHT_OPENS = _fact("in_flight_opens", "opens in flight plus files opened but not yet read")
IN_FLIGHT_READS = _fact("in_flight_reads", "reads in flight")
IN_FLIGHT_WRITES = _fact("in_flight_writes", "writes in flight")
DEPTH_LIMIT = _fact("depth_limit", "reads and writes in flight together, at most, as configured (iodepth)")
DEPTH_POSSIBLE = _fact(
    "depth_possible", "what the staging granted allows of depth_limit, smallest over slot sizes in use"
)
DEPTH_ACHIEVED = _fact("depth_achieved", "mean of reads and writes in flight over the time that any was, since start")
DEPTH_MAX = _fact("depth_max", "most reads and writes in flight together, since start")
BUSY_S = _fact("busy_s", "seconds with at least one read or write in flight, since start")
DEPTH_SECONDS = _fact("depth_seconds", "integral of in-flight reads and writes over time; / busy_s = depth_achieved")

SLOTS_FREE = _fact("slots_free", "slots that hold nothing")
SLOTS_FILLING = _fact("slots_filling", "slots that the kernel or a rank writes into")
SLOTS_RESIDENT = _fact("slots_resident", "slots with a whole object, pinned or not")
SLOTS_PINNED = _fact("slots_pinned", "of the resident ones, those with at least one pin")
SLOTS_QUARANTINED = _fact("slots_quarantined", "slots that wait for a proof that nothing touches them")
SLOTS_CACHED = _fact("slots_cached", "of the resident ones, those that only the staging cache keeps")
SLOTS_ADMITTED = _fact("slots_admitted", "slots of objects that are kept, or read ahead, for waiting requests")
SLOT_SIZES = _fact("slot_sizes", "number of different slot sizes in use")

LOADS = _fact("loads", "objects answered Ready")
LOADS_OLDER = _fact("loads_older", "of these, stored before this process started, or by another host")
LOADS_RESIDENT = _fact("loads_resident", "of these, already in staging when asked")
LOADS_JOINED = _fact("loads_joined", "of these, served by a read that somebody else had begun")
CACHE_HITS = _fact("cache_hits", "objects asked for, stored again or wanted ahead that the staging cache had")
PRELOAD_HITS = _fact("preload_hits", "objects asked for that had been read ahead, or were being")
PRELOAD_READS = _fact("preload_reads", "objects read ahead")
EVICTED_BEFORE_USE = _fact("evicted_before_use", "objects read ahead whose slots went to others before any use")
STORES = _fact("stores", "objects published")
STORES_DROPPED = _fact("stores_dropped", "keys offered and not stored; the reasons stand beside it")
STORES_DROPPED_OFF = _fact("stores_dropped_off", "of these: stores were turned off")
STORES_DROPPED_ROOM = _fact("stores_dropped_room", "of these: the device had no room")
STORES_DROPPED_DEVICE = _fact("stores_dropped_device", "of these: the device was given up for the time")
STORES_DROPPED_DRAINING = _fact("stores_dropped_draining", "of these: the pool was ending")
STORES_DROPPED_STAGING = _fact("stores_dropped_staging", "of these: staging has too few slots of that size")
STORES_DROPPED_LATE = _fact("stores_dropped_late", "of these: no slot came in time, or it was not filled in time")
STORES_DROPPED_CANCELLED = _fact("stores_dropped_cancelled", "of these: a rank cancelled, or left")
STORES_DROPPED_PREFIX = _fact("stores_dropped_prefix", "of these: a key before it in its prefix was dropped")
STORES_EXISTED = _fact("stores_existed", "objects offered that needed no store")
BYTES_LOADED = _fact("bytes_loaded", "payload bytes read from the device")
BYTES_STORED = _fact("bytes_stored", "payload bytes published on the device")
SET_ASIDE = _fact("set_aside", "files moved out of the way since their bytes were not those published")

INDEX_OBJECTS = _fact("index_objects", "objects in the index")
INDEX_COMPLETE = _fact("index_complete", "True: the scan of the directory has ended for every namespace opened")
BREAKER = _fact("breaker", "closed (healthy), open (device given up for now), probing")
BREAKER_OPENED = _fact("breaker_opened", "times the device was given up since its worker started")
BREAKER_TRIALS_FAILED = _fact("breaker_trials_failed", "trials of the given-up device that failed")
BREAKER_WHY = _fact("breaker_why", "what gave the device up last")
READ_BYTES_PER_S = _fact("read_bytes_per_s", "measured read speed; 0: not measured")
WRITE_BYTES_PER_S = _fact("write_bytes_per_s", "measured write speed; 0: not measured")
BACKLOG_BYTES = _fact("backlog_bytes", "bytes of loads queued or in flight")
CAPACITY_BYTES = _fact("capacity_bytes", "what may lie on the device, as configured; 0: no such bound")
USED_BYTES = _fact("used_bytes", "what lies on the device, as the filesystem counts; absent until it was counted")
STORING = _fact("storing", "False: the device takes no new objects now, for lack of room or by `kvpool stores off`")
STORING_WHY = _fact("storing_why", "with storing False: what is lacking, or who turned it off")
EVICTED_KEYS = _fact("evicted_keys", "keys removed for lack of room, since start")
EVICTED_BYTES = _fact("evicted_bytes", "bytes removed with them, as the filesystem counts")
EVICTIONS_SPARED = _fact("evictions_spared", "keys that were to be removed and were in use")
SPACE_FREE_BYTES = _fact("space_free_bytes", "free bytes on the device's file system, for us")
SPACE_TOTAL_BYTES = _fact("space_total_bytes", "size of the device's file system")

# ---------------------------------------------------------------- rows of attached clients

CLIENT = _fact("client", "the pool's number for this client")
ENGINE = _fact("engine", "the vLLM engine it belongs to")
RANK = _fact("rank", "rank within the engine")
MODEL = _fact("model", "model name of its namespace")
NAMESPACE = _fact("namespace", "the pool's number for what it stores")
JOBS = _fact("jobs", "rank: jobs submitted and not ended")
COPIES_IN_FLIGHT = _fact("copies_in_flight", "rank: objects being copied between slots and the model's memory")
SEGMENTS_MAPPED = _fact("segments_mapped", "rank: segments of staging mapped")
SEGMENTS_PINNED = _fact("segments_pinned", "rank: of these, pinned for fast copies (all, where nothing needs pinning)")
REQUESTS_ANNOUNCED = _fact("requests_announced", "scheduler: requests announced and not withdrawn")
LOOKUPS_HIT = _fact("lookups_hit", "scheduler: keys answered as hit")
LOOKUPS_MISSED = _fact("lookups_missed", "scheduler: keys answered as miss")
MISSED_UNCONNECTED = _fact("missed_unconnected", "scheduler: misses since no pool is attached")
MISSED_SILENT = _fact("missed_silent", "scheduler: misses since the pool does not answer")
MISSED_UNANSWERED = _fact("missed_unanswered", "scheduler: misses since the pool's answer came too late")
MISSED_UNANNOUNCED = _fact("missed_unannounced", "scheduler: misses of keys that no request was announced with")
MISSED_ABSENT = _fact("missed_absent", "scheduler: misses of keys that are not stored")
BYTES_SERVED = _fact("bytes_served", "rank: payload bytes brought to the engine")
BYTES_KEPT = _fact("bytes_kept", "rank: payload bytes taken from the engine, or stored before")
SELF_TEST = _fact("self_test", "rank: round trip at its start: passed, failed, not yet, unproven, off")
SELF_TEST_WHY = _fact("self_test_why", "rank: why it has not passed; empty otherwise")
ANSWERS_LATE = _fact("answers_late", "scheduler: announcements that became misses since no answer came in time")

# ---------------------------------------------------------------- the pool line

VERSION = _fact("version", "version of kvpool")
RUN_DIR = _fact("run_dir", "directory of the pool's socket")
GENERATION = _fact("generation", "number of this run of the coordinator")
STARTED_BY = _fact("started_by", "serve (by hand) or client (detached, ends after the last client)")
STAGING_BYTES = _fact("staging_bytes", "staging memory as configured")
STAGING_READY_BYTES = _fact("staging_ready_bytes", "of it, created and prefaulted")
STAGING_ADVICE = _fact("staging_advice", "when staging is smaller than configured: why, and the number to set")
STAGING_LEAVING_BYTES = _fact("staging_leaving_bytes", "of it, or beyond it, being taken back from the workers")
STAGING_CHANGING = _fact("staging_changing", "True: segments are being made, moved or given back")
PRELOAD_WAITING = _fact("preload_requests_waiting", "preload on: requests that wait")
PRELOAD_ADMISSIONS = _fact("preload_admissions", "preload on: requests whose objects are kept or being read ahead")
PRELOAD_LANDED = _fact("preload_admissions_landed", "of these, those with all objects in staging")
PRELOAD_PROTECTED_BYTES = _fact("preload_protected_bytes", "staging that is kept for them")
PRELOAD_ASKED = _fact("preload_asked", "admissions asked for")
PRELOAD_COMMITTED = _fact("preload_committed", "of these, those that every device had room for")
PRELOAD_REFUSED = _fact("preload_refused", "of these, those that some device had no room for")
PRELOAD_LANDED_TOTAL = _fact("preload_landed", "admissions of which everything came to be in staging")
PRELOAD_REPLACED = _fact("preload_replaced", "admissions that a larger one of the same request took the place of")
PRELOAD_USED = _fact("preload_used", "admissions whose request started with everything in staging")
PRELOAD_WITHDRAWN = _fact("preload_withdrawn", "admissions whose request ended, or started before all was there")
PRELOAD_EXPIRED = _fact("preload_expired", "admissions whose request did not start in time")
PRELOAD_REVOKED = _fact("preload_revoked", "admissions that loads had to take slots from")
PRELOAD_LOST = _fact("preload_lost", "admissions that ended with a device")
PRELOAD_UNANSWERED = _fact("preload_unanswered", "admissions that a device did not answer in time")
STORES_ON = _fact("stores_on", "False: turned off by `kvpool stores off`; loads go on")
SEGMENTS = _fact("segments", "segments that exist")
SEGMENTS_QUARANTINED = _fact("segments_quarantined", "segments of dead workers that wait for proof")
DEVICES = _fact("devices", "devices configured")
DEVICES_HEALTHY = _fact("devices_healthy", "devices whose worker runs and whose breaker is closed")
CLIENTS = _fact("clients", "ranks and schedulers attached")
KEYS = _fact("keys", "keys in the coordinator's mirror of the indexes")
ENGINES_OUTDATED = _fact("engines_outdated", "engines that neither load nor store until they reset, as others did")
PEERS_REFUSED = _fact("peers_refused", "peers closed for a bad greeting, a bad frame, or another uid")
PEERS_DROPPED = _fact("peers_dropped", "peers dropped since they did not read")

#: The STORING_WHY of a pool that was told to store nothing.
STORES_TURNED_OFF = "turned off by `kvpool stores off`"
ERRORS_PREFIX = "errors_"


def errors(code_name: str) -> str:
    """Return the name of the counter of one `errors.Code`: `errors_corrupt` for "CORRUPT"."""
    return ERRORS_PREFIX + code_name.lower()
