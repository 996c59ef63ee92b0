"""The background writer: it never blocks, is bounded by records and characters, and counts lost records."""

import dataclasses
import threading
import time

import structlog

from lorikeet.router.metrics.groups import Counter
from lorikeet.router.usage_log import MAX_CHARACTERS, MAX_RECORDS, BackgroundWriter, Unwritten, UsageRecord

RECORD = UsageRecord(
    time="2026-01-01T00:00:00.000Z",
    request_id="a",
    route="/generate",
    status=200,
    key=None,
    model="m",
    adapter=None,
    adapter_digest=None,
    sequences=1,
    prompt_tokens=2,
    cached_tokens=0,
    generated_tokens=3,
    drafted_tokens=0,
    accepted_tokens=0,
    queue_seconds=0.1,
    first_token_seconds=0.2,
    total_seconds=0.3,
    finish_reasons=["length"],
    error=None,
    input=None,
    output=None,
)


class Slow:
    """Writes once `may_write` is set."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.written: list[str] = []
        self.num_reopened = 0
        self.is_closed = False

    def write(self, record: UsageRecord) -> None:
        self.may_write.wait(60)
        self.written.append(record.request_id)

    def reopen(self) -> None:
        self.num_reopened += 1

    def close(self) -> None:
        self.is_closed = True


def named(name: str) -> UsageRecord:
    return dataclasses.replace(RECORD, request_id=name)


def test_all_records_are_written_in_order_on_close() -> None:
    writer, dropped = Slow(), Counter()
    out = BackgroundWriter("file", [writer], dropped)
    for number in range(100):
        out.put(named(str(number)))
    writer.may_write.set()
    out.close(10)
    assert writer.written == [str(number) for number in range(100)]
    assert writer.is_closed
    assert dropped.values == {"file": 0}


def test_a_hanging_writer_blocks_nothing_and_losses_are_counted() -> None:
    writer, dropped = Slow(), Counter()
    out = BackgroundWriter("file", [writer], dropped)
    began = time.monotonic()
    with structlog.testing.capture_logs() as lines:
        for number in range(MAX_RECORDS + 12):
            out.put(named(str(number)))
        assert time.monotonic() - began < 5
        num_lost = dropped.values["file"]
        assert num_lost in (11, 12)  # the writer may hold one
        writer.may_write.set()
        out.close(10)
    assert len(writer.written) == MAX_RECORDS + 12 - num_lost
    assert [(line["event"], line["to"]) for line in lines] == [("usage_dropped", "file")]


def test_texts_are_bounded_too() -> None:
    writer, dropped = Slow(), Counter()
    out = BackgroundWriter("url", [writer], dropped)
    text = "x" * (MAX_CHARACTERS // 4)
    for _ in range(8):
        out.put(dataclasses.replace(RECORD, input=text))
    assert dropped.values["url"] in (3, 4)
    writer.may_write.set()
    out.close(10)
    assert len(writer.written) == 8 - dropped.values["url"]


def test_capacity_is_freed() -> None:
    writer, dropped = Slow(), Counter()
    writer.may_write.set()
    out = BackgroundWriter("url", [writer], dropped)
    text = "x" * (MAX_CHARACTERS // 2)
    for number in range(8):
        out.put(dataclasses.replace(RECORD, input=text, output=["y", "z"]))
        end = time.monotonic() + 10
        while len(writer.written) <= number:
            assert time.monotonic() < end
            time.sleep(0.001)
    out.close(10)
    assert dropped.values == {"url": 0}


def test_unwritten_records_are_counted_at_the_end() -> None:
    writer, dropped = Slow(), Counter()
    out = BackgroundWriter("url", [writer], dropped)
    for number in range(5):
        out.put(named(str(number)))
    with structlog.testing.capture_logs() as lines:
        out.close(0.05)
    assert dropped.values["url"] >= 4
    assert [line["reason"] for line in lines] == ["the server ended before they were written"]
    writer.may_write.set()


class Broken(Slow):
    """Fails with Unwritten, and with another exception."""

    def write(self, record: UsageRecord) -> None:
        if record.request_id == "known":
            raise Unwritten("the disk is full")
        if record.request_id == "unknown":
            raise RuntimeError("CANARY")
        super().write(record)

    def reopen(self) -> None:
        raise Unwritten("no such folder")


def test_a_failure_is_logged_once_and_others_are_written() -> None:
    writer, dropped = Broken(), Counter()
    writer.may_write.set()
    with structlog.testing.capture_logs() as lines:
        out = BackgroundWriter("file", [writer], dropped)
        for name in ("1", "known", "2", "unknown", "3", "known", "4"):
            out.put(named(name))
        out.close(10)
    assert writer.written == ["1", "2", "3", "4"]
    assert dropped.values == {"file": 3}
    assert [line["reason"] for line in lines] == ["the disk is full"]


def test_an_unknown_failure_is_logged_by_its_type_only() -> None:
    with structlog.testing.capture_logs() as lines:
        out = BackgroundWriter("file", [Broken()], Counter())
        out.put(named("unknown"))
        out.close(10)
    assert [line["reason"] for line in lines] == ["RuntimeError"]


def test_files_are_opened_again_without_a_record_to_write() -> None:
    writer = Slow()
    out = BackgroundWriter("file", [writer], Counter())
    out.reopen()
    end = time.monotonic() + 10
    while not writer.num_reopened:
        assert time.monotonic() < end
        time.sleep(0.001)
    out.close(10)
    assert writer.num_reopened == 1


def test_a_file_that_cannot_be_opened_again_loses_nothing() -> None:
    writer, dropped = Broken(), Counter()
    writer.may_write.set()
    with structlog.testing.capture_logs() as lines:
        out = BackgroundWriter("file", [writer], dropped)
        out.reopen()
        out.put(named("1"))
        out.close(10)
    assert writer.written == ["1"]
    assert dropped.values == {"file": 0}
    assert [line["reason"] for line in lines] == ["no such folder"]
