"""The kinds of events in a run's log, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

_Number = Annotated[float, Field(gt=-1e15, lt=1e15)]
_Whole = Annotated[int, Field(gt=-(10**15), lt=10**15)]


class Event(BaseModel):
    """What all events have: when it ended (t, seconds as `now`), the rank that wrote it, and its kind.

    Facts that other versions write beside those declared here are kept. A kind of another version is a plain Event.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    t: _Number
    rank: _Whole
    kind: str


class Start(Event):
    """The process has joined the others. `created` identifies it together with its pid (`processes.created_s`).

    launch_s: seconds from the start of its launcher to its own; import_s: from then until it began with the run;
    join_s: until all ranks had met.
    """

    kind: Literal["start"]
    pid: _Whole
    created: _Number
    host: str
    threads: _Whole
    device: str
    dtype: str
    backend: str
    launch_s: _Number | None = None
    import_s: _Number | None = None
    join_s: _Number | None = None


class Loaded(Event):
    """The model is loaded, and what can be encoded before the clock starts is encoded, which took `encode_s`."""

    kind: Literal["loaded"]
    encode_s: _Number | None = None


class Warm(Event):
    """The untimed steps before the warm-up samples: the first one, cold, took `cold_s`, the second `seconds`.

    `sent_bytes` went to other ranks of the lockstep group.
    """

    kind: Literal["warm"]
    seconds: _Number
    cold_s: _Number | None = None
    sent_bytes: _Number | None = None


class Clock(Event):
    """The clock starts. See `disturbed.Surroundings` for the facts."""

    kind: Literal["clock"]
    asleep_s: _Number | None = None
    other_ranks: _Whole | None = None


class OfSample(Event):
    """Base of the events that belong to a sample; warm-up samples are negative."""

    sample: _Whole


class Take(OfSample):
    """A stage has received a sample, after waiting for `seconds`."""

    kind: Literal["take"]
    seconds: _Number


class Encode(OfSample):
    """A row of a manifest was encoded, on the first stage while later ones denoised the rows before."""

    kind: Literal["encode"]
    seconds: _Number


class SwapBegins(Event):
    """An expert begins to take the place of another on the device."""

    kind: Literal["swap"]
    expert: str


class Swapped(Event):
    """An expert of `size` bytes of parameters is on the device, `seconds` after the other began to go."""

    kind: Literal["swapped"]
    expert: str
    seconds: _Number
    size: _Whole


class Step(OfSample):
    """A denoising step."""

    kind: Literal["step"]
    step: _Whole
    seconds: _Number


class Send(OfSample):
    """A stage has handed a sample on, a message of `size` bytes, after waiting for `seconds` until there was room."""

    kind: Literal["send"]
    seconds: _Number
    size: _Whole | None = None


class Finished(OfSample):
    """The last step of a sample is done and its latents, where they are kept, are saved."""

    kind: Literal["sample"]


class Pad(Event):
    """A step of a padding sample, which only keeps the ranks of a shard group in lockstep."""

    kind: Literal["pad"]
    step: _Whole
    seconds: _Number


class Decode(OfSample):
    """The decoding of a sample begins."""

    kind: Literal["decode"]


class Chunk(OfSample):
    """Some frames of a sample are decoded."""

    kind: Literal["chunk"]


class Video(OfSample):
    """The videos of a sample are written, `seconds` after its decoding began; to write them took `write_s` of these."""

    kind: Literal["video"]
    seconds: _Number
    write_s: _Number | None = None


class Comparing(OfSample):
    """The official pipeline, with which a sample will be compared, has done a step."""

    kind: Literal["comparing"]
    step: _Whole


class Official(OfSample):
    """A sample is compared with the official pipeline's. The relative difference of latents is the largest difference
    of two values, divided by the largest magnitude of an official one."""

    kind: Literal["official"]
    equal_latents: bool
    equal_frames: bool
    max_latent_difference: float  # may be NaN
    max_frame_difference: int | float
    max_batch_difference: float | None = None
    relative_latent_difference: float | None = None  # may be NaN; earlier versions did not record it


class LastWord(Event):
    """Base of the last event of a rank."""


class BadEnd(LastWord):
    """Base of the last event of a rank that did not finish its work."""


class Done(LastWord):
    """All work of the rank is done. Memory in GB (1e9 bytes)."""

    kind: Literal["done"]
    memory: dict[str, Any]
    decode_memory: dict[str, Any] | None = None
    asleep_s: _Number | None = None
    other_ranks: _Whole | None = None
    device_use: _Number | None = None


class Error(BadEnd):
    """The rank failed; because it lost a rank, or blames one, where that is known."""

    kind: Literal["error"]
    error: str
    lost_rank: _Whole | Literal["unknown"] | None = None
    blamed: _Whole | None = None
    oom: dict[str, Any] | None = None


class Terminated(BadEnd):
    """The rank was ended from outside."""

    kind: Literal["terminated"]


class Plain(Event):
    """No further facts: a part of a file went to rank 0 or arrived there (`engine.collect`)."""

    kind: Literal["gather"]


class Predicted(Event):
    """The predicted peak memory, as runs of earlier versions recorded it."""

    kind: Literal["predicted"]
    predicted_memory: dict[str, Any]


AnyStep = Step | Pad
Kind = TypeVar("Kind", bound=Event)
_KNOWN: TypeAdapter[Event] = TypeAdapter(
    Annotated[
        Start | Plain | Loaded | Warm | Clock | Take | Encode | SwapBegins | Swapped | Step | Send | Finished | Pad
        | Decode | Chunk | Video | Comparing | Official | Done | Error | Terminated | Predicted,
        Field(discriminator="kind"),
    ]
)  # fmt: skip


def parse(line: bytes) -> Event | None:
    """The event on a line; None where the line is damaged."""
    try:
        return _KNOWN.validate_json(line)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] != "union_tag_invalid":
            return None
    try:
        return Event.model_validate_json(line)  # a kind of another version
    except ValidationError:
        return None


def of(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """The events of one kind, in the given order."""
    return [event for event in events if isinstance(event, kind)]


def last_of(events: Iterable[Event], kind: type[Kind]) -> dict[int, Kind]:
    """Rank -> its last event of one kind, sorted by rank."""
    return {event.rank: event for event in sorted(of(events, kind), key=lambda event: event.rank)}


def clock_starts(events: Sequence[Event]) -> dict[int, float]:
    """Rank -> t at which the clock started on its machine.

    All ranks start it when they leave one barrier. Machines' clocks differ, so each machine's times count from its own
    start.
    """
    host = hosts(events)
    zero: dict[str | None, float] = {}
    for event in of(events, Clock):
        place = host.get(event.rank)
        zero[place] = min(zero.get(place, event.t), event.t)
    ranks = {event.rank for event in events}
    return {rank: zero[host.get(rank)] for rank in ranks if host.get(rank) in zero}


def hosts(events: Sequence[Event]) -> dict[int, str]:
    """Rank -> the machine that it started on."""
    return {rank: start.host for rank, start in last_of(events, Start).items()}


def position(own: Sequence[Event], steps: range) -> tuple[int | None, int | None]:
    """The sample and step that a rank was at when it wrote its last event: the step after the last one it finished.

    Args:
        own: the rank's events, sorted by time.
        steps: those of its stage.
    """
    for event in reversed(own):
        match event:
            case Decode() | Chunk() | Video() | Comparing() | Official():
                return event.sample, None
            case Take():  # where experts are swapped, a sample is taken again for the steps of the next
                done = [step.step + 1 for step in of(own, Step) if step.sample == event.sample]
                return event.sample, done[-1] if done and done[-1] in steps else steps[0]
            case Step():
                return event.sample, min(event.step + 1, steps[-1])
    return None, None
