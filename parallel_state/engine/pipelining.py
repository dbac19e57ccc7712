"""Plan a pipeline schedule of torch's without the part that only a run needs."""

from __future__ import annotations

from typing import Any


def order_only(schedule: type[Any]) -> type[Any]:
    """Return torch's class of a pipeline schedule without its plan of messages, which takes most of the time
    and which only a run needs; what each rank computes in which order stays.
    """
    messages = {"_prepare_schedule_with_comms": lambda *_, **__: None}
    return type(schedule.__name__, (schedule,), messages)
