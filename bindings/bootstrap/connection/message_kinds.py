"""The table of all messages between processes of sirtaki: who sends which, and how long it may be.

A message is one frame (`wire`). Its receiver compares kind and length with this table before it reads on.
"""

from __future__ import annotations

import enum


class Form(enum.Enum):
    """The content of a payload. The numbers of a message are in its header."""

    NOTHING = enum.auto()
    BYTES = enum.auto()
    TEXT = enum.auto()
    JSON = enum.auto()  # an object


class Sender(enum.Enum):
    """A side of a connection that sends messages."""

    HVDRUN = enum.auto()  # to the agent on another host
    AGENT = enum.auto()  # to hvdrun


NOTHING, BYTES, TEXT, JSON = Form
HVDRUN, AGENT = Sender

SHORT = 64 << 10
LONG = 1 << 20


@enum.unique
class MessageKind(enum.IntEnum):
    """Number, form, largest payload in bytes, and senders of each kind.

    `rank` in the header of a frame is the rank that it is about, if any; `number` is said below.
    """

    form: Form
    limit: int
    senders: tuple[Sender, ...]

    def __new__(cls, value: int, form: Form, limit: int, *senders: Sender) -> MessageKind:
        kind = int.__new__(cls, value)
        kind._value_, kind.form, kind.limit, kind.senders = value, form, limit, senders
        return kind

    # ---- hvdrun to an agent (runner/hosts) -------------------------------------------------------------

    ASK = 1, JSON, LONG, HVDRUN  # the job's folder and program, whether torch's variables are set, the
    # address for metrics
    START = 2, JSON, 16 << 20, HVDRUN  # everything that the ranks of this host need
    SIGNAL = 3, NOTHING, 0, HVDRUN  # its number, for `rank`; no rank: all ranks stop, or go on (Ctrl-Z)
    GRANT = 4, NOTHING, 0, HVDRUN  # how many more bytes of stream `rank`, 1 or 2, of ranks may be sent
    COLLECT = 5, NOTHING, 0, HVDRUN  # the job has failed: send failure reports as soon as they exist
    FINISH = 6, NOTHING, 0, HVDRUN  # all ranks have ended: send their remaining files, and end
    LAUNCH = 7, JSON, LONG, HVDRUN  # starts one more rank, in a job whose ranks come and go
    LEASE = 8, NOTHING, 0, HVDRUN  # the number of the ALIVE whose sender may let its ranks run on
    SPARE = 9, JSON, LONG, HVDRUN  # starts a spare, which waits for a LAUNCH; `rank` is its lane, below -1
    DISMISS = 10, NOTHING, 0, HVDRUN  # the spare in lane `rank` is not needed
    WATCH = 11, NOTHING, 0, HVDRUN  # somebody watches: send the states of the ranks, with this number
    ORDER = 12, JSON, SHORT, HVDRUN  # a recording that the ranks make (sirtaki.bindings.observing)
    REACH = 13, JSON, SHORT, HVDRUN  # starts ssh to another host; `rank` is its lane, as in the next three
    PASS = 14, BYTES, SHORT, HVDRUN  # for its input
    PASS_END = 15, NOTHING, 0, HVDRUN  # the end of its input
    DROP = 16, NOTHING, 0, HVDRUN  # the number of a signal for it

    # ---- An agent to hvdrun ----------------------------------------------------------------------------

    ANSWER = 20, JSON, LONG, AGENT  # the version, this host, what is missing here, an address for torch
    STARTED = 21, NOTHING, 0, AGENT  # the pid of `rank`
    REFUSED = 22, TEXT, SHORT, AGENT  # why `rank` could not be started
    STDOUT = 23, BYTES, SHORT, AGENT  # what `rank` has written
    STDERR = 24, BYTES, SHORT, AGENT
    ENDED = 25, JSON, SHORT, AGENT  # how `rank` ended
    REPORT = 26, BYTES, 4 << 20, AGENT  # the failure report of `rank`
    TIMELINE = 27, BYTES, SHORT, AGENT  # a piece of the timeline of `rank`
    ALIVE = 28, NOTHING, 0, AGENT  # greater each time; shows a lost connection, and asks for a LEASE
    DONE = 29, NOTHING, 0, AGENT  # the agent has left nothing behind
    LEAVING = 30, NOTHING, 0, AGENT  # the agent was asked to end (SIGTERM): its ranks leave at a commit
    WORKER_TIMELINE = 31, BYTES, SHORT, AGENT  # a piece of generation `number` (0: the changes) of a worker
    SPARE_WAITS = 32, JSON, SHORT, AGENT  # the modules of the spare in lane `rank`, and their seconds
    SPARE_ENDED = 33, TEXT, SHORT, AGENT  # how the spare in lane `rank` ended, or why it has no process
    STATE = 34, JSON, LONG, AGENT  # the state of a rank, for the WATCH of that number, and the time there
    PASSED = 35, BYTES, SHORT, AGENT  # what the ssh in lane `rank` has written
    PASSED_ERROR = 36, BYTES, SHORT, AGENT  # the same, to its standard error
    PASSED_END = 37, JSON, SHORT, AGENT  # how it ended


KINDS = {int(kind): kind for kind in MessageKind}
# The kinds that each sender may send.
FROM = {sender: frozenset(kind for kind in MessageKind if sender in kind.senders) for sender in Sender}
