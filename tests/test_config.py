from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.topology import Topology
from rackserve.config import ServerConfig, Settings, load_settings, resolve
from rackserve.live.runner import RunnerSpec, layout_of


def test_without_anything_settings_are_the_defaults() -> None:
    assert load_settings(None, []) == Settings()


def test_overrides_win_over_the_file_and_the_file_over_the_base(tmp_path: Path) -> None:
    base = Settings(seed=1, topology=Topology(prefill_workers=3, decode_workers=2, prefill_blocks=7))
    path = tmp_path / "settings.toml"
    path.write_text("seed = 2\n[topology]\ndecode_workers = 5\nprefill_blocks = 8\n")
    settings = load_settings(str(path), ["topology.prefill_blocks=9"], base)
    assert settings.seed == 2
    assert settings.topology == msgspec.structs.replace(base.topology, decode_workers=5, prefill_blocks=9)


def test_slots_for_resume_state_are_there_without_being_asked_for_where_the_model_has_such_state() -> None:
    topology = Topology(prefill_blocks=64, decode_blocks=160, segment_blocks=32)
    spec = RunnerSpec(window=True)
    sized = Settings(topology=topology, runner=spec).sized()
    assert sized.topology.rank_windows == 4 * sized.scheduler.max_sequences + 4 and sized.topology.segment_windows == 3
    sized.check_layout(layout_of(spec))
    assert sized.sized() == sized
    mine = Settings(topology=msgspec.structs.replace(topology, rank_windows=7), runner=spec).sized().topology
    assert (mine.rank_windows, mine.segment_windows) == (7, 3)
    alone = Settings(topology=msgspec.structs.replace(topology, pool=False), runner=spec).sized().topology
    assert alone.segment_windows == 0


def test_state_that_is_not_stored_takes_no_room_in_the_pool() -> None:
    sized = Settings(runner=RunnerSpec(kind="deepseek_v41", model="golden", resume="bounded_replay")).sized()
    assert sized.topology.rank_windows > 0 == sized.topology.segment_windows
    sized.check_layout(layout_of(sized.runner))


@pytest.mark.parametrize("spec", [RunnerSpec(), RunnerSpec(kind="llama", model="no-such-model")])
def test_a_model_without_resume_state_gets_no_slots(spec: RunnerSpec) -> None:
    assert Settings(runner=spec).sized() == Settings(runner=spec)


def test_of_two_overrides_of_a_key_the_later_one_counts() -> None:
    assert load_settings(None, ["seed=1", "seed=2"]).seed == 2


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('[router]\npolicy = "least_load"\n[server]\ngrace = 2.5\n[topology]\npool = false\n')
    yaml.write_text("router:\n  policy: least_load\nserver: {grace: 2.5}\ntopology:\n  pool: no\n")
    assert load_settings(str(toml), []) == load_settings(str(yaml), []) != Settings()


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load_settings(str(path), []) == Settings()


@pytest.mark.parametrize("text", ["1e9", "1.0e+9", "1000000000", "1_000_000_000"])
def test_a_number_may_be_written_in_every_usual_way(text: str, tmp_path: Path) -> None:
    assert load_settings(None, [f"rates.fetch_bytes_per_s={text}"]).rates.fetch_bytes_per_s == 1e9
    path = tmp_path / "rates.yaml"
    path.write_text(f"rates:\n  fetch_bytes_per_s: {text}\n")
    assert load_settings(str(path), []).rates.fetch_bytes_per_s == 1e9


def test_an_override_may_hold_an_equals_sign() -> None:
    assert load_settings(None, ["server.tokenizer=/a=b"]).server.tokenizer == "/a=b"


@pytest.mark.parametrize("text", ["9" * 30, "-" + "9" * 30])
def test_a_seed_fits_64_bits(text: str) -> None:
    with pytest.raises(ConfigError, match="seed must fit 64 bits"):
        load_settings(None, [f"seed={text}"])


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "9" * 5000, "2020-99-99", "0x" + "f" * 5000, "1e999", ".nan"])
def test_a_value_nobody_could_mean_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, [f"rates.prefill_tokens_per_s={text}"])
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.yaml", "seed: " + "[" * 5000),
        ("deep.toml", "seed = " + "[" * 5000),
        ("long.toml", "seed = " + "9" * 5000),
        ("long.yaml", "seed: " + "9" * 5000),
    ],
)
def test_a_file_nobody_could_mean_is_one_error(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(FileFormatError, match=rf"{name}: not (TOML|YAML): "):
        load_settings(str(path), [])


@pytest.mark.parametrize(("name", "text"), [("a.toml", "seed = 7\n"), ("a.yaml", "seed: 7\n")])
def test_a_byte_order_mark_is_no_part_of_the_text(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    assert load_settings(str(path), []).seed == 7


def test_unknown_keys_of_a_file_are_errors_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    for text, key in (("colour: red\n", "colour"), ("server:\n  colour: red\n", "server.colour"), ("1: 2\n", "1")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"unknown setting {key};"):
            load_settings(str(path), [])


def test_a_section_without_keys_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("server:\n")
    with pytest.raises(ConfigError, match="server: expected a section with keys, got None"):
        load_settings(str(path), [])


def test_a_section_in_place_of_a_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"setting server\.port: Expected `int`, got `object`"):
        load_settings(None, ["server.port.number=3"])


def test_settings_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"deadlines\.queue must not exceed deadlines\.silence"):
        load_settings(None, ["deadlines.queue=1000"])
    with pytest.raises(ConfigError, match=r"deadlines\.lookup \+ deadlines\.transfer"):
        load_settings(None, ["deadlines.transfer=60"])


def test_the_rack_s_part_is_every_section_that_nodes_see() -> None:
    settings = load_settings(None, ["topology.prefill_workers=5", "router.policy=round_robin", "scheduler.max_sequences=3"])
    rack = settings.rack
    assert type(rack) is RackConfig
    for name in RackConfig.__struct_fields__:
        assert getattr(rack, name) == getattr(settings, name)


def test_the_text_of_settings_gives_them_back() -> None:
    settings = load_settings(None, ["seed=7", "server.host=::1", "runner.kind=digest", "topology.pool=false"])
    lines = settings.as_text().splitlines()
    assert load_settings(None, [line.replace(" = ", "=", 1) for line in lines]) == settings
    assert len(lines) == len({line.split(" = ")[0] for line in lines})


def test_a_server_config_out_of_range_names_the_field() -> None:
    for port in (-1, 65_536):
        with pytest.raises(ConfigError, match=r"server\.port"):
            ServerConfig(port=port)
    for length in (-1, 10**30):
        with pytest.raises(ConfigError, match=r"server\.max_model_len"):
            ServerConfig(max_model_len=length)
    for grace in (-0.1, math.nan, math.inf, 1e300):
        with pytest.raises(ConfigError, match=r"server\.grace"):
            ServerConfig(grace=grace)


def test_more_synthetic_tokens_a_step_than_drafts_can_yield_are_refused() -> None:
    drafts = ["scheduler.num_draft=2", "scheduler.max_steps_in_flight=1"]
    with pytest.raises(ConfigError, match=r"num_draft = 2 a step yields 3 tokens at most"):
        load_settings(None, ["runner.kind=deepseek_v41", "runner.synthetic_acceptance=3.5", *drafts])


def test_the_environment_wins_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("seed = 2\n[server]\nport = 1\n")
    environment = {
        "RACKSERVE_SERVER__PORT": "5",
        "RACKSERVE_SEED": "9",
        "RACKSERVE_API_KEY": "k",
        "HOME": "/",
        "RACKSERVE_CACHE": "x",
    }
    found = resolve(str(path), [], environment=environment)
    assert (found.settings.server.port, found.settings.seed) == (5, 9)
    assert found.origins == {"seed": "RACKSERVE_SEED", "server.port": "RACKSERVE_SERVER__PORT"}
    assert load_settings(str(path), ["server.port=6"], environment=environment).server.port == 6
    assert load_settings(None, []).server.port == 8000


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "RACKSERVE_SERVER__PROT",
            "1",
            r"^RACKSERVE_SERVER__PROT: unknown setting server\.prot; .*; did you mean server\.port\?$",
        ),
        ("RACKSERVE_SERVER__PORT", "x", r"^setting server\.port: Expected `int`, got `str` \(RACKSERVE_SERVER__PORT\)$"),
        ("RACKSERVE_SERVER__PORT", "[", r"^RACKSERVE_SERVER__PORT: the value is not YAML"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_settings(None, [], environment={variable: value})


@pytest.mark.parametrize("name", ["s.toml", "s.yaml"])
def test_an_unknown_key_of_a_file_is_told_with_its_line_and_the_nearest(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    toml = "seed = 1\n[server]\nport = 1\n[router]\n# policy\npolcy = 'x'\n"
    path.write_text(toml if name == "s.toml" else "seed: 1\nserver:\n  port: 1\nrouter:\n  # policy\n  polcy: x\n")
    with pytest.raises(ConfigError, match=rf"^{path}:6: unknown setting router\.polcy; .*; did you mean router\.policy\?$"):
        load_settings(str(path), [])
    path.write_text(
        (toml if name == "s.toml" else path.read_text()).replace("polcy", "policy").replace("port", "prefill_blocks")
    )
    with pytest.raises(
        ConfigError, match=r":3: unknown setting server\.prefill_blocks; .*; did you mean topology\.prefill_blocks\?$"
    ):
        load_settings(str(path), [])


@pytest.mark.parametrize(
    "text",
    ["a: !!python/object/apply:os.system ['true']", "a: &x [1]\nb: *x", "<<: &a {seed: 1}\nx: *a"],
    ids=["object", "alias", "merge"],
)
def test_a_file_of_settings_makes_no_objects_and_no_copies(text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="not YAML"):
        load_settings(str(path), [])


@pytest.mark.parametrize("text", ["[]", "3", "''", "false"])
def test_a_settings_file_that_holds_no_sections_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(FileFormatError, match="expected sections"):
        load_settings(str(tmp_path / "settings.yaml"), [])
    (tmp_path / "settings.yaml").write_text("# nothing yet\n")
    assert load_settings(str(tmp_path / "settings.yaml"), []) == Settings()


def test_a_server_bounds_its_queues_and_is_fair_unless_told_otherwise() -> None:
    plain = load_settings(None, [])
    assert (plain.router.max_queued_requests_per_rank, plain.router.max_queued_tokens_per_rank) == (0, 0)
    served = resolve(None, ["topology.prefill_blocks=100", "runner.block_tokens=8"]).for_clients()
    assert (served.router.max_queued_requests_per_rank, served.router.max_queued_tokens_per_rank) == (256, 3200)
    assert served.scheduler.order == "shortest_first"
    given = ["router.max_queued_requests_per_rank=0", "router.max_queued_tokens_per_rank=7", "scheduler.order=fcfs"]
    told = resolve(None, given).for_clients()
    assert told == load_settings(None, given)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("seed=1", "auto"),
        ("topology.decode_ranks=2", "torch"),
        ("topology.prefill_tp=2", "auto"),
        ("runner.kernels=native", "native"),
    ],
)
def test_all_ranks_compute_by_a_path_that_all_of_them_have(change: str, path: str) -> None:
    settings = load_settings(None, ["runner.kind=deepseek_v41", "runner.model=golden", "runner.block_tokens=32", change])
    assert settings.engine.kernels == path


def test_a_value_that_is_none_of_the_choices_is_refused_with_them() -> None:
    for name, choices in (("runner.kernels", "auto, native, torch"), ("server.log", "none, text, json")):
        with pytest.raises(ConfigError, match=rf"^setting {name}: Invalid enum value 'nope'; it is one of {choices}$"):
            load_settings(None, [f"{name}=nope"])
