from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from pathlib import Path

import httpx
import msgspec
import pytest

from rackserve.api.keys import KEY_VARIABLE
from rackserve.api.server import listen
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.topology import Topology
from rackserve.config import SecurityConfig, ServerConfig, Settings
from rackserve.digest_model import cold_output, digest_layout
from rackserve.live.rank_spec import RankStatus
from rackserve.live.recorder import Recorded
from rackserve.live.runner import RunnerSpec, layout_of
from rackserve.live.supervisor import SupervisorConfig
from rackserve.model.files import GOLDEN_FOLDER
from rackserve.serving import OpenServer, _can_serve, describe_model, health_of, open_keys, open_server
from rackserve.text.deepseek_tokenizer import complete
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.tokenizer import pack, unpack
from rackserve.verify import Transcript
from tests.e2e.rig import VOCABULARY, hex_tokenizer
from tests.live.processes import has_ended, until

LAYOUT = digest_layout(16)
SMALL = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=64, decode_blocks=48, segment_blocks=16)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(hex_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def settings(tokenizer: str, **server: object) -> Settings:
    spec = RunnerSpec(vocab_size=VOCABULARY)
    return Settings(topology=SMALL, runner=spec, server=ServerConfig(port=0, tokenizer=tokenizer, **server))  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is served


def test_the_context_is_what_the_smallest_rank_holds_unless_less_is_asked_for(tokenizer: str) -> None:
    assert describe_model(settings(tokenizer), LAYOUT).max_model_len == 48 * 16
    assert describe_model(settings(tokenizer, max_model_len=100), LAYOUT).max_model_len == 100


def test_a_context_longer_than_a_rank_holds_is_refused_with_both_numbers(tokenizer: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.max_model_len is 769: .*a rank's blocks hold 768 \(raise topology"):
        describe_model(settings(tokenizer, max_model_len=769), LAYOUT)


def test_a_tokenizer_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=str(tmp_path)):
        describe_model(settings(str(tmp_path)), LAYOUT)


def test_a_model_without_a_tokenizer_is_spoken_to_in_numbers() -> None:
    digest = describe_model(settings(""), LAYOUT).tokenizer
    assert digest.decode(unpack(digest.encode("7 40999"))) == "7 40999 " and digest.vocab_size == VOCABULARY
    spec = RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=32)
    golden = describe_model(msgspec.structs.replace(settings(""), runner=spec), layout_of(spec))
    assert (golden.names, golden.eos_ids, golden.vocab_size, golden.max_model_len) == (("golden",), (1,), 512, 1024)
    assert golden.tokenizer.vocab_size == 512 and golden.template is None


def test_the_toy_model_chats_if_its_tokenizer_has_a_template(tokenizer: str, tmp_path: Path) -> None:
    assert describe_model(settings(tokenizer), LAYOUT).template is None
    folder = shutil.copytree(tokenizer, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    template = describe_model(settings(str(folder)), LAYOUT).template
    assert template is not None and template.render([{"role": "user", "content": "00ff"}]) == "00ff"


def test_a_deepseek_model_with_its_tokenizer_can_chat(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN_FOLDER, tmp_path / "model")
    complete(folder)
    spec = RunnerSpec(kind="deepseek_v41", model=str(folder), block_tokens=32)
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ token ids, the model 512"):
        describe_model(msgspec.structs.replace(settings(""), runner=spec), layout_of(spec))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 129_280
    (folder / "config.json").write_text(json.dumps(config))
    served = describe_model(msgspec.structs.replace(settings(""), runner=spec), layout_of(spec))
    assert served.tokenizer.vocab_size > 129_000 and isinstance(served.template, DsmlTemplate)


@pytest.mark.parametrize(("change", "other"), [({"activation_rounding": True}, True), ({"weights": "stored"}, False)])
def test_kv_that_is_rounded_otherwise_has_another_namespace(change: dict[str, object], other: bool) -> None:
    spec = RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=32)
    roots = [
        describe_model(msgspec.structs.replace(settings(""), runner=runner), layout_of(spec)).namespace.root()
        for runner in (spec, msgspec.structs.replace(spec, **change))
    ]
    assert (roots[0] != roots[1]) is other


def test_a_template_may_name_the_tokens_of_its_model(tokenizer: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.model.tiny import write_folder

    write_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 50_000}))  # as many as the tokenizer has
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    spec = msgspec.structs.replace(settings(tokenizer), runner=RunnerSpec(kind="llama", model=str(tmp_path)))
    template = describe_model(spec, LAYOUT).template
    assert template is not None and template.render([{"role": "user", "content": "x"}]) == "<s>x"


def test_kv_of_another_layout_or_format_has_another_namespace(tokenizer: str) -> None:
    served = describe_model(settings(tokenizer), LAYOUT)
    same = describe_model(settings(tokenizer, served_model_name="other"), LAYOUT)
    assert served.namespace.root() == same.namespace.root() and (served.names, same.names) == (("digest",), ("other",))
    window = describe_model(settings(tokenizer), digest_layout(16, window=True))
    assert window.namespace.root() != served.namespace.root()


# ---------------------------------------------------------------- readiness


def status(role: str, state: str) -> RankStatus:
    return RankStatus(f"{role}0", role, state, 1, 1, 0, 0.0, 0.0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill", "decode", "ready"),
    [
        (["up"], ["up"], True),
        (["failed", "up"], ["up"], True),
        (["down"], ["starting"], True),  # it comes back, and requests wait for it
        (["failed"], ["up"], False),
        (["up"], ["failed", "failed"], False),
    ],
)
def test_a_rack_can_serve_while_each_role_has_a_rank_that_is_up_or_comes_back(
    prefill: list[str], decode: list[str], ready: bool
) -> None:
    ranks = [status("prefill", state) for state in prefill] + [status("decode", state) for state in decode]
    assert _can_serve(ranks) is ready


# ---------------------------------------------------------------- a server in this process


async def ask(client: httpx.AsyncClient, ids: list[int], max_tokens: int) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": ids, "max_tokens": max_tokens, "temperature": 0})


def client_of(server: OpenServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20)


def test_sinks_and_transcript_see_what_clients_see_and_leaving_waits_for_open_answers(tokenizer: str) -> None:
    events: list[Recorded] = []
    transcript = Transcript()
    ids = [7, 8, 9] * 20

    async def run() -> list[int]:
        async with open_server(settings(tokenizer), [events.append], transcript) as server:
            pids = list(server.rack.pids.values())
            assert (await client_of(server).get("/health")).status_code == 200
            slow = asyncio.create_task(ask(client_of(server), ids, 300))
            await until(lambda: any(answer.tokens for answer in transcript.answers.values()))
        answer = await slow
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 300
        with pytest.raises(httpx.ConnectError):
            await client_of(server).get("/health")
        return pids

    pids = asyncio.run(asyncio.wait_for(run(), 30))
    assert len(pids) == 2 and all(has_ended(pid) for pid in pids)
    (answer,) = transcript.answers.values()
    assert answer.complete and answer.tokens == cold_output(pack(ids), 300, vocab_size=VOCABULARY)
    names = [type(item.event).__name__ for item in events]
    assert names.count("RequestArrived") == names.count("RequestEnded") == 1 and "StepDone" in names


def test_a_server_left_by_an_exception_does_not_wait_for_open_answers(tokenizer: str) -> None:
    async def run() -> tuple[httpx.Response, list[int]]:
        transcript = Transcript()
        with pytest.raises(ZeroDivisionError):
            async with open_server(settings(tokenizer, grace=600.0), tap=transcript) as server:
                pids = list(server.rack.pids.values())
                endless = asyncio.create_task(ask(client_of(server), [1], 700))
                await until(lambda: transcript.answers)
                raise ZeroDivisionError
        return await endless, pids

    answer, pids = asyncio.run(asyncio.wait_for(run(), 20))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
    assert len(pids) == 2 and all(has_ended(pid) for pid in pids)


def test_a_server_that_cannot_start_gives_its_port_back(tokenizer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = ServerConfig(port=port, max_model_len=2**30)

    async def run() -> None:
        with pytest.raises(ConfigError, match=r"server\.max_model_len"):
            async with open_server(Settings(topology=SMALL, runner=RunnerSpec(), server=server)):
                pytest.fail("it started")

    asyncio.run(asyncio.wait_for(run(), 30))
    listen("127.0.0.1", port).close()


def test_an_age_without_a_beginning_is_null() -> None:
    status = RankStatus("prefill0", "prefill", "up", 7, 1, 0, 0.12345, -1.0, 3)
    assert (health_of(status)["beat_age"], health_of(status)["step_age"], health_of(status)["pid"]) == (0.123, None, 7)


# ---------------------------------------------------------------- stuck, busy, idle, loading


async def phase(client: httpx.AsyncClient) -> tuple[int, str]:
    answer = await client.get("/health")
    return answer.status_code, answer.json()["phase"]


def test_a_frozen_rank_with_work_is_stuck_with_its_age_and_idle_is_not(tokenizer: str) -> None:
    calm = msgspec.structs.replace(settings(tokenizer, stuck=1.0), supervisor=SupervisorConfig(heartbeat=600.0))

    async def scene() -> None:
        async with open_server(calm) as server, client_of(server) as client:
            pid = server.rack.pids["decode0"]
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(1.1)  # idle for longer than the limit
                assert await phase(client) == (200, "ready")
                answer = asyncio.create_task(ask(client, [7, 8, 9] * 20, 4))
                async with asyncio.timeout(15):
                    while (told := await client.get("/health")).status_code == 200:
                        await asyncio.sleep(0.05)
                assert told.json()["phase"] == "stuck" and told.json()["stuck"]["seconds"] >= 1  # rounded to tenths
                assert (await client.get("/ready")).status_code == 503 and (await client.get("/live")).status_code == 200
            finally:
                os.kill(pid, signal.SIGCONT)
            assert (await answer).status_code == 200
            assert await phase(client) == (200, "ready")

    asyncio.run(asyncio.wait_for(scene(), 40))


def test_a_step_longer_than_the_limit_is_busy_not_stuck(tokenizer: str) -> None:
    slow = msgspec.structs.replace(settings(tokenizer, stuck=1.0), runner=RunnerSpec(vocab_size=VOCABULARY, step_ms=2000.0))

    async def scene() -> list[tuple[int, str]]:
        async with open_server(slow) as server, client_of(server) as client:
            answer = asyncio.create_task(ask(client, [1, 2, 3], 1))
            seen = []
            while not answer.done():
                seen.append(await phase(client))
                await asyncio.sleep(0.1)
            assert (await answer).status_code == 200
            return seen

    seen = asyncio.run(asyncio.wait_for(scene(), 40))
    assert len(seen) > 10 and set(seen) == {(200, "ready")}


def test_a_server_answers_while_its_rack_starts(tokenizer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def scene() -> list[tuple[int, str]]:
        seen = []

        async def watch() -> None:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                while not seen or seen[-1][0] != 200:
                    with contextlib.suppress(httpx.TransportError):
                        seen.append(await phase(client))
                        assert (await client.get("/live")).status_code == 200
                    await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        async with open_server(_at(settings(tokenizer), port)):
            await watching
        return seen

    seen = asyncio.run(asyncio.wait_for(scene(), 30))
    assert seen[0] == (503, "loading") and seen[-1] == (200, "ready") and set(seen) == {seen[0], seen[-1]}


def _at(settings: Settings, port: int) -> Settings:
    return msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, port=port))


def test_metrics_tell_what_ranks_and_pool_hold(tokenizer: str) -> None:
    async def scene() -> dict[str, float]:
        async with open_server(settings(tokenizer, metrics_aliases=True)) as server, client_of(server) as client:
            await ask(client, [7, 8, 9] * 20, 4)
            value = server.metrics.registry.get_sample_value
            full = {"holder": "prefill0.0", "state": "cached"}
            await until(lambda: value("rackserve_kv_blocks", full) and value("rackserve_pool_stored_blocks_total"))
            assert b'vllm:num_requests_running{engine="0",model_name="digest"}' in server.metrics.exposition()
            names = ("prefill0.0", "decode0.0", "pool.0")
            return {name: value("rackserve_kv_blocks", {"holder": name, "state": "total"}) or 0 for name in names}

    assert asyncio.run(asyncio.wait_for(scene(), 30)) == {"prefill0.0": 64, "decode0.0": 48, "pool.0": 32}


# ---------------------------------------------------------------- who may ask


def test_a_server_that_others_can_reach_needs_a_key(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        open_keys(settings(tokenizer, host="0.0.0.0"))
    assert not open_keys(settings(tokenizer))
    keyless = msgspec.structs.replace(settings(tokenizer, host="0.0.0.0"), security=SecurityConfig(keyless=True))
    assert not open_keys(keyless)
    monkeypatch.setenv(KEY_VARIABLE, "k")
    assert open_keys(settings(tokenizer, host="0.0.0.0")).find("k") is not None


def test_the_key_is_asked_for_over_http_and_other_host_names_are_refused(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k")

    async def scene() -> list[int]:
        async with open_server(settings(tokenizer)) as server, httpx.AsyncClient(base_url=server.url) as client:
            answers = [
                await client.get("/v1/models"),
                await client.get("/v1/models", headers={"x-api-key": "k"}),
                await client.get("/health"),
                await client.get("/health", headers={"host": "evil"}),
            ]
            known = await client.get("/health", headers={"x-api-key": "k"})
            assert "ranks" in known.json() and "ranks" not in answers[2].json()
            return [answer.status_code for answer in answers]

    assert asyncio.run(scene()) == [401, 200, 200, 421]
