"""A cache with a bound in bytes that forgets what was used longest ago; safe between threads."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """Values by key while their sizes sum up to at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """The value of `key`, None if it isn't here (any more)."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return entry[0]

    def put(self, key: Hashable, value: Value, num_bytes: int) -> None:
        """Keep `value`; one that is larger than the whole cache is not kept."""
        with self._lock:
            known = self._entries.pop(key, None)
            if known is not None:
                self.num_bytes -= known[1]
            if num_bytes > self.max_bytes:
                return
            self._entries[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0
