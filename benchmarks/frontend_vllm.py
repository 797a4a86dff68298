"""vLLM's API server before an engine that costs nothing: `python frontend_vllm.py FOLDER IDS` prints its port and serves.

Runs in an environment with vLLM. Its own server, parsing, rendering, tokenising, detokenising and statistics are used as they
are; only the client of its engine process is replaced, so the sockets between the two processes are left out, as they are for
rackserve. FOLDER and IDS as in `frontend_ours`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frontend_floor import Beat, Due

MODEL = "tiny"
MAX_MODEL_LEN = 131_072


class EngineClient:
    """What the API server asks of an engine process."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._beat = Beat(self._emit)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._beat.add(request.request_id, request.sampling_params.max_tokens)

    async def get_output_async(self) -> Any:
        return await self._outputs.get()

    async def abort_requests_async(self, requests: list[str]) -> None:
        """Nobody leaves early here."""

    async def reset_mm_cache_async(self) -> None:
        """There is no cache."""

    def get_kv_event_sources(self) -> list[Any]:
        return []

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to end."""

    def _emit(self, due: Due) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.metrics.stats import SchedulerStats

        size = len(self._ids)
        outputs = [
            EngineCoreOutput(name, [self._ids[at % size]], finish_reason=FinishReason.LENGTH if last else None)
            for name, at, last in due
        ]
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats()))


def main() -> None:
    folder, ids = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.core_client import EngineCoreClient

    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: EngineClient(ids))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sys.argv = [
        "vllm", "--model", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    print(port, flush=True)
    entry.main()


if __name__ == "__main__":
    main()
