"""
TOML (or vLLM's connector settings) to typed settings.

Theory. One declaration per setting: its type, default, unit, bounds and help text stand together, in the structs
below. Reading, checking, the messages about what is wrong, and `config.example.toml` all come from them. A
setting that is not as declared raises ConfigError with file, key, value and what is allowed; nothing is guessed
and nothing is ignored.

Covers: the settings, TOML, the JSON in which they go to the pool's processes, where a pool lives by default.
Does not cover: vLLM's `kv_connector_extra_config` (`config_connector.py`), the printed example
(`config_example.py`), what the machine allows (`io/shm.py`).
"""

import difflib
import hashlib
import itertools
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from kvpool.errors import ConfigError

#: Greatest weight of a device, and of an engine.
WEIGHT_MAX = 1000
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: Most devices of one pool; in messages a device is one byte, and 255 means none.
DEVICES_MAX = 64
#: Least staging for each device.
STAGING_BYTES_MIN = MIB
#: Longest path a Unix socket can have, and the longest name of ours below a run directory.
SOCKET_PATH_BYTES_MAX = 107
RUN_DIR_BYTES_MAX = SOCKET_PATH_BYTES_MAX - len("/pool.sock")

_FILE_BYTES_MAX = MIB
_VALUE_SHOWN_MAX = 80
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,9})?)\s*(B|KiB|MiB|GiB|TiB)\s*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


# ------------------------------------------------------------ how a setting is declared


class Rule(NamedTuple):
    """
    What a setting may be, beside its type.

    Attributes:
        help: One or two sentences for the example and the documentation.
        key: Its name in TOML; empty: the field's name.
        unit: `bytes` (written "4GiB"), `seconds`, or what is counted.
        low, high: Bounds of a number, both allowed.
        shown: What the example shows where there is no fixed default.
        derived: Where the default comes from, when it is not fixed.
        choices: All values of a text, when they are few.
    """

    help: str
    key: str = ""
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    shown: str = ""
    derived: str = ""
    choices: tuple[str, ...] = ()


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[pool]: the whole pool, once."""

    run_dir: Annotated[
        str,
        Rule(
            "Directory of the pool's socket, lock and log, made with mode 0700. All who use a pool name the same one.",
            shown="/run/user/1000/kvpool",
            derived="below /run/user/<uid>, $XDG_RUNTIME_DIR or /tmp, named after these settings",
        ),
    ]
    staging_bytes: Annotated[
        int,
        Rule(
            "Shared memory through which everything passes, shared by all devices and all clients. The machine's "
            "/dev/shm and locked-memory limit must allow it.",
            key="staging",
            unit="bytes",
            low=STAGING_BYTES_MIN,
            high=1 << 50,
        ),
    ] = GIB
    load_deadline_s: Annotated[
        float, Rule("An object not loaded by then counts as failed, and vLLM recomputes it.", "", "seconds", 0.01, 3600)
    ] = 30.0
    store_deadline_s: Annotated[
        float, Rule("A store that has no staging slot by then is dropped: a later miss.", "", "seconds", 0.001, 600)
    ] = 1.0
    fill_deadline_s: Annotated[
        float, Rule("A store whose bytes have not left the GPU by then is dropped.", "", "seconds", 0.01, 3600)
    ] = 30.0
    operation_deadline_s: Annotated[
        float,
        Rule("A read or write that a device has not ended by then fails what waits for it.", "", "seconds", 0.01, 3600),
    ] = 10.0
    breaker_failures: Annotated[
        int,
        Rule(
            "A device is given up for now when so many more of its reads (or writes) failed than worked; until it "
            "answers again its keys are misses and its stores go to the other devices.",
            "",
            "operations",
            1,
            1000,
        ),
    ] = 5
    breaker_retry_s: Annotated[
        float,
        Rule(
            "A given-up device is tried after this long, then after twice as long, and so on.", "", "seconds", 0.01, 60
        ),
    ] = 1.0
    answer_deadline_s: Annotated[
        float,
        Rule(
            "A waiting request whose keys the pool has not told about by then is computed: more than a moment only "
            "where processors are scarce.",
            "",
            "seconds",
            0.001,
            60,
        ),
    ] = 0.05
    defer_backlog_s: Annotated[
        float,
        Rule(
            "A request whose bytes must be read waits, holding nothing, while a device has this much reading to do.",
            "",
            "seconds",
            0.0,
            600,
        ),
    ] = 1.0
    enable_preload: Annotated[
        bool,
        Rule(
            "Read the objects of waiting requests ahead, so that they are in staging when the request runs: those of "
            "a whole request or none, in the order in which requests are scheduled, and never while loads need the "
            "drive."
        ),
    ] = False
    preload_lookahead_requests: Annotated[
        int,
        Rule(
            "Waiting requests of each engine that are looked at for preload, from the first one on. At least 1 with "
            "enable_preload.",
            "",
            "requests",
            0,
            4096,
        ),
    ] = 0
    preload_expiry_s: Annotated[
        float,
        Rule(
            "What was read ahead for a request that has not run after so long is no longer kept for it.",
            "",
            "seconds",
            0.1,
            86400,
        ),
    ] = 60.0
    load_patience_s: Annotated[
        float,
        Rule(
            "Loads that wait for staging, and got none for so long, take it from what is kept for the waiting request "
            "that is last in order, all of that.",
            "",
            "seconds",
            0.001,
            60,
        ),
    ] = 0.02
    staging_cache: Annotated[
        str,
        Rule(
            "What stays in staging as long as nobody needs the memory: nothing (off), or what was used last (lru), or "
            "what was used last or often (arc).",
            choices=("off", "lru", "arc"),
        ),
    ] = "off"
    idle_exit_s: Annotated[
        float,
        Rule(
            "A pool that an engine started ends this long after its last client left; `kvpool serve` runs on.",
            "",
            "seconds",
            0.0,
            86400,
        ),
    ] = 2.0
    client_share: Annotated[
        float,
        Rule(
            "Share of the slots of one size that one client may hold while others use that size too.",
            low=0.01,
            high=1.0,
        ),
    ] = 0.5
    self_test: Annotated[
        bool,
        Rule(
            "At its start each rank moves a pattern from device memory through staging to every device and back, in "
            "the background, and compares it. Where other bytes come back, that rank neither stores nor loads."
        ),
    ] = True
    verify: Annotated[
        bool,
        Rule(
            "Write a checksum with every object and check it when the object is read. Off saves about 0.1 CPU seconds "
            "per GB each way; objects stored without one are not served by a pool that verifies."
        ),
    ] = True


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[device]]: one for each drive; each gets an I/O process of its own."""

    name: Annotated[str, Rule("What the device is called in health and logs.", shown="nvme0")]
    path: Annotated[
        str, Rule("Absolute path of a directory on the drive; what is below it is ours.", shown="/mnt/nvme0/kvpool")
    ]
    iodepth: Annotated[int, Rule("Reads and writes in flight together.", "", "operations", 1, 1024)] = 16
    open_lookahead: Annotated[
        int,
        Rule(
            "Files being opened, or opened and not yet read: hides the file system's latency without holding staging.",
            "",
            "files",
            1,
            4096,
            derived="as iodepth",
        ),
    ] = 16
    writes_beside_loads: Annotated[
        int, Rule("Writes in flight while loads wait or run, so that stores yield.", "", "operations", 1, 1024)
    ] = 4
    sync_on_store: Annotated[
        bool, Rule("fsync every file and its directory before the object counts as stored: survives a power cut.")
    ] = False
    shared: Annotated[
        bool,
        Rule(
            "Other hosts' pools use the same directory: keys that this one does not know are looked for by name when a "
            "request asks for them, once in 2 seconds. Each host counts what others stored only now and then, so leave "
            "the capacity some room."
        ),
    ] = False
    capacity_bytes: Annotated[
        int,
        Rule(
            "What may lie below the path, as the filesystem counts it. Above the high watermark the keys that were not "
            "used for longest are removed; at the capacity stores stop. 0B: no bound but the drive's.",
            key="capacity",
            unit="bytes",
            low=0,
            high=1 << 60,
        ),
    ] = 0
    high_watermark: Annotated[float, Rule("Removing begins above this share of the capacity.", "", "", 0.02, 1.0)] = (
        0.95
    )
    low_watermark: Annotated[float, Rule("Removing ends at this share of the capacity.", "", "", 0.01, 0.99)] = 0.9
    min_free_bytes: Annotated[
        int,
        Rule(
            "Free space that is left to others, whatever they use: below it keys are removed and stores stop. "
            "0B: 2 % of the filesystem.",
            key="min_free",
            unit="bytes",
            low=0,
            high=1 << 60,
        ),
    ] = 0
    weight: Annotated[
        int, Rule("Share of new objects, beside the other devices' weights.", "", "parts", 1, WEIGHT_MAX)
    ] = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of one pool."""

    pool: PoolSettings
    device: list[DeviceSettings]


class Field(NamedTuple):
    """One setting as declared: for reading, and for printing."""

    key: str
    name: str
    kind: type
    default: Any
    rule: Rule

    @property
    def allowed(self) -> str:
        """What its value may be, in words."""
        if self.kind is bool:
            return "true or false"
        if self.rule.choices:
            return " or ".join(f'"{choice}"' for choice in self.rule.choices)
        if self.kind is str:
            return "text"
        if self.rule.unit == "bytes":
            return f'a size such as "4GiB", from {format_size(self.rule.low)} to {format_size(self.rule.high)}'
        number = "a whole number" if self.kind is int else "a number"
        unit = f" of {self.rule.unit}" if self.rule.unit else ""
        return f"{number}{unit} from {self.rule.low:g} to {self.rule.high:g}"


def fields_of(struct: type[msgspec.Struct]) -> list[Field]:
    """Return the settings of one section, in the order of their declaration."""
    fields = []
    for field in msgspec.structs.fields(struct):
        kind, rule = field.type.__origin__, field.type.__metadata__[0]
        fields.append(Field(rule.key or field.encode_name, field.name, kind, field.default, rule))
    return fields


# ------------------------------------------------------------ reading


def load_settings(file: str | Path) -> Settings:
    """
    Read a TOML file.

    Raises:
        ConfigError: It cannot be read, or a setting is wrong: names file, key, value, and what is allowed.
    """
    try:
        with open(file, "rb") as stream:
            data = stream.read(_FILE_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        raise ConfigError("cannot read the configuration", file=str(file), reason=str(error)) from error
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError("configuration file too long", file=str(file), allowed=f"at most {_FILE_BYTES_MAX} bytes")
    return parse_settings(text, file=str(file))


def parse_settings(text: str, *, file: str) -> Settings:
    """Read the text of a TOML file; *file* is what errors call it. Raises as :func:`load_settings`."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("not TOML", file=file, reason=str(error)) from error
    return settings_from_tables(tables, file=file)


def settings_from_tables(tables: Mapping[str, Any], *, file: str) -> Settings:
    """Return the settings of tables as TOML gives them, with defaults. Raises as :func:`load_settings`."""
    refuse_unknown(tables, ("pool", "device"), file=file, section="")
    pool = tables.get("pool", {})
    devices = tables.get("device", [])
    if not isinstance(pool, dict):
        raise wrong(file, "pool", pool, "a table: [pool]")
    if not isinstance(devices, list) or not 1 <= len(devices) <= DEVICES_MAX:
        raise wrong(file, "device", devices, f"1 to {DEVICES_MAX} tables: [[device]]")
    read = [_device_from(table, f"device[{index}]", file) for index, table in enumerate(devices)]
    values = values_from(pool, PoolSettings, "pool", file=file)
    if "run_dir" not in values:
        values["run_dir"] = ""
        values["run_dir"] = default_run_dir(Settings(pool=PoolSettings(**values), device=read))
    settings = Settings(pool=PoolSettings(**values), device=read)
    check_settings(settings, file=file)
    return settings


def _device_from(table: object, section: str, file: str) -> DeviceSettings:
    if not isinstance(table, dict):
        raise wrong(file, section, table, "a table: [[device]]")
    values = values_from(table, DeviceSettings, section, file=file)
    values.setdefault("open_lookahead", values.get("iodepth", 16))
    if values["path"].startswith("/"):
        values["path"] = os.path.normpath(values["path"])
    return DeviceSettings(**values)


def values_from(table: Mapping[str, Any], struct: type[msgspec.Struct], section: str, *, file: str) -> dict[str, Any]:
    """Return the fields of *struct* that *table* gives, checked one by one. Raises as :func:`load_settings`."""
    fields = fields_of(struct)
    refuse_unknown(table, [field.key for field in fields], file=file, section=section)
    values = {}
    for field in fields:
        if field.key in table:
            values[field.name] = checked(table[field.key], field, f"{section}.{field.key}", file=file)
        elif field.default is msgspec.NODEFAULT and not field.rule.derived:
            raise ConfigError("setting is missing", file=file, key=f"{section}.{field.key}", allowed=field.allowed)
    return values


def checked(value: Any, field: Field, key: str, *, file: str) -> Any:
    """Return *value* as the field's type; raise ConfigError where it is none of what is allowed."""
    number: int | float | None = None
    if field.rule.unit == "bytes" and isinstance(value, str):
        number = parse_size(value)
    elif field.kind in (int, float) and isinstance(value, int if field.kind is int else (int, float)):
        number = None if isinstance(value, bool) else value
    elif type(value) is field.kind and (not field.rule.choices or value in field.rule.choices):
        return value
    if number is None or not field.rule.low <= number <= field.rule.high:
        raise wrong(file, key, value, field.allowed)
    return field.kind(number)


def check_settings(settings: Settings, *, file: str) -> None:
    """
    Refuse settings that are each allowed and do not fit one another.

    Raises:
        ConfigError: names file, key, value, and what is allowed.
    """
    _check_run_dir(settings.pool.run_dir, file)
    check_preload(settings.pool, "pool.preload_lookahead_requests", file=file)
    needed = STAGING_BYTES_MIN * len(settings.device)
    if settings.pool.staging_bytes < needed:
        allowed = f"at least {format_size(needed)} for {len(settings.device)} devices"
        raise wrong(file, "pool.staging", format_size(settings.pool.staging_bytes), allowed)
    for index, device in enumerate(settings.device):
        key = f"device[{index}]"
        if not _NAME.fullmatch(device.name):
            raise wrong(file, f"{key}.name", device.name, "1 to 32 letters, digits, '.', '_', '-'")
        if device.low_watermark >= device.high_watermark:
            allowed = f"less than high_watermark, {device.high_watermark:g}"
            raise wrong(file, f"{key}.low_watermark", device.low_watermark, allowed)
        if not _is_absolute(device.path) or device.path == "/":
            raise wrong(file, f"{key}.path", device.path, "an absolute path of a directory")
    for (first, left), (second, right) in itertools.combinations(enumerate(settings.device), 2):
        if left.name == right.name:
            raise wrong(file, f"device[{second}].name", right.name, f"another name than device[{first}] has")
        if _nested(left.path, right.path):
            raise wrong(
                file, f"device[{second}].path", right.path, f"a directory neither in nor above device[{first}]'s"
            )


def check_preload(pool: PoolSettings, key: str, *, file: str) -> None:
    """Refuse preload that looks at no request; *key* is what errors call the number. Raises ConfigError."""
    if pool.enable_preload and pool.preload_lookahead_requests < 1:
        raise wrong(file, key, pool.preload_lookahead_requests, "at least 1, as enable_preload is true")


def _check_run_dir(run_dir: str, file: str) -> None:
    if not _is_absolute(run_dir):
        raise wrong(file, "pool.run_dir", run_dir, "an absolute path")
    if len(os.fsencode(run_dir)) > RUN_DIR_BYTES_MAX:
        raise wrong(file, "pool.run_dir", run_dir, f"at most {RUN_DIR_BYTES_MAX} bytes, as a Unix socket lies in it")


def _is_absolute(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and _encodable(path)


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeError:
        return False
    return True


def _nested(left: str, right: str) -> bool:
    """Whether one directory is, or contains, the other; symbolic links are followed as far as they exist."""
    first, second = (os.path.realpath(path) + "/" for path in (left, right))
    return first.startswith(second) or second.startswith(first)


# ------------------------------------------------------------ what errors say


def wrong(file: str, key: str, value: object, allowed: str) -> ConfigError:
    """Return the error about one value."""
    return ConfigError("wrong value", file=file, key=key, value=shown(value), allowed=allowed)


def refuse_unknown(table: Mapping[str, Any], known: Sequence[str], *, file: str, section: str) -> None:
    """Raise ConfigError for the first key that is not known; it names the nearest known one."""
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                "unknown key",
                file=file,
                key=f"{section}.{shown(key, quoted=False)}".lstrip("."),
                value=shown(table[key]),
                allowed=f"the nearest known one is {nearest!r}",
            )


def shown(value: object, *, quoted: bool = True) -> str:
    """Return *value* for a message: on one line, shortened."""
    try:
        text = ascii(value) if quoted else ascii(value)[1:-1]
    except (ValueError, RecursionError):  # a number or a nesting beyond what Python prints
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= _VALUE_SHOWN_MAX else f"{text[: _VALUE_SHOWN_MAX - 3]}..."


# ------------------------------------------------------------ sizes


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as "4GiB" or "1.5 MiB"; None where it is none."""
    found = _SIZE.fullmatch(text)
    return None if found is None else int(Fraction(found[1]) * _UNITS[found[2]])


def format_size(size: float) -> str:
    """Return a size with the greatest unit that divides it, as :func:`parse_size` reads it."""
    for unit, unit_bytes in reversed(_UNITS.items()):
        if size >= unit_bytes and size % unit_bytes == 0:
            return f"{int(size // unit_bytes)}{unit}"
    return f"{int(size)}B"


# ------------------------------------------------------------ between processes


def to_json(settings: Settings) -> str:
    """Return settings as JSON, for the pool's processes."""
    return msgspec.json.encode(settings).decode()


def from_json(text: str | bytes, *, file: str = "JSON settings") -> Settings:
    """
    Read what :func:`to_json` wrote.

    Raises:
        ConfigError: It is something else.
    """
    try:
        plain = msgspec.json.decode(text, type=Settings)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError("not settings", file=file, reason=str(error)) from error
    for section, struct in _sections(plain):
        for field in fields_of(type(struct)):
            checked(getattr(struct, field.name), field, f"{section}.{field.key}", file=file)
    check_settings(plain, file=file)
    return plain


def _sections(settings: Settings) -> Iterator[tuple[str, msgspec.Struct]]:
    yield "pool", settings.pool
    for index, device in enumerate(settings.device):
        yield f"device[{index}]", device


# ------------------------------------------------------------ where a pool lives


def identity(settings: Settings) -> str:
    """Return 8 hex digits over everything but the run directory: equal settings are one pool."""
    plain = msgspec.to_builtins(settings)
    plain["pool"]["run_dir"] = ""
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()[:8]


def default_run_dir(settings: Settings) -> str:
    """Return the run directory of settings that name none: the same for all who have the same settings."""
    uid = os.getuid()
    name = f"kvpool-{uid}-{identity(settings)}"
    candidates = [f"/run/user/{uid}", os.environ.get("XDG_RUNTIME_DIR", "")]
    usable = (path for path in candidates if _usable(path) and len(os.fsencode(f"{path}/{name}")) <= RUN_DIR_BYTES_MAX)
    return f"{next(usable, '/tmp')}/{name}"


def _usable(directory: str) -> bool:
    """Whether *directory* is ours alone and may be written, as the XDG base directory specification asks."""
    if not directory.startswith("/"):
        return False
    try:
        facts = os.stat(directory)
    except OSError:
        return False
    private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return private and os.access(directory, os.W_OK | os.X_OK)
