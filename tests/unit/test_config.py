"""Settings: defaults, both families of names, messages, agreement of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hvdlite import config
from hvdlite.collectives import ring, select
from hvdlite.config import Config, ConfigError, compare, launcher_size

ROOT = Path(__file__).resolve().parents[2]


def test_an_empty_environment_gives_the_defaults():
    assert Config.from_environment({}) == Config()
    assert Config().fusion_threshold == 64 * 2**20


def test_sizes_default_to_what_the_collectives_measured():
    sizes = (Config().small_message, Config().shared_memory_piece, Config().ring_chunk)
    assert sizes == (select.SMALL_BYTES, select.PIECE_BYTES, ring.CHUNK_BYTES)


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("HVDLITE_CACHE_CAPACITY", "17")
    assert Config.from_environment().cache_capacity == 17


def test_every_setting_survives_the_way_through_its_text():
    odd = Config(
        fusion_threshold=1,
        spin=0.1 + 0.2,  # no short decimal
        backend="ring",
        shared_memory=False,
        thread_affinity=(3, 0, 7),
        shared_memory_dir="/a b/c",
        stall_warning=1e-9,
        log_level="trace",
    )
    environ = {
        config.variable(field.name): field.metadata["knob"].kind.render(getattr(odd, field.name))
        for field in dataclasses.fields(Config)
    }
    assert Config.from_environment(environ) == odd


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("0", False),
        ("true", True),
        ("No", False),
        ("on", True),
        ("off", False),
        ("2", True),
        ("-1", False),
    ],
)
def test_a_flag_is_read_in_words_and_numbers(text, value):
    assert Config.from_environment({"HVDLITE_SHARED_MEMORY": text}).shared_memory is value


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "1048576", "fusion_threshold", 2**20),
        ("HOROVOD_CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "5", "stall_warning", 5.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7", "stall_shutdown", 7.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warning", 0.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_warning", 60.0),
        ("HOROVOD_LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("HOROVOD_LOG_HIDE_TIME", "1", "log_hide_time", True),
        ("HOROVOD_DISABLE_GROUP_FUSION", "1", "disable_group_fusion", True),
        ("HOROVOD_THREAD_AFFINITY", "0,2,4", "thread_affinity", (0, 2, 4)),
        ("HOROVOD_AUTOTUNE", "1", "autotune", True),
        ("HOROVOD_AUTOTUNE_LOG", "a.csv", "autotune_log", "a.csv"),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "0", "autotune_warmup_samples", 0),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "5", "autotune_steps_per_sample", 5),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "7", "autotune_bayes_opt_max_samples", 7),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.5", "autotune_gaussian_process_noise", 0.5),
    ],
)
def test_horovod_names_are_aliases(name, text, field, value):
    assert getattr(Config.from_environment({name: text}), field) == value


def test_our_name_wins_over_horovods():
    environ = {"HVDLITE_CACHE_CAPACITY": "25", "HOROVOD_CACHE_CAPACITY": "1"}
    assert Config.from_environment(environ).cache_capacity == 25
    environ = {"HVDLITE_STALL_WARNING": "9", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert Config.from_environment(environ).stall_warning == 9.0


def test_disabling_the_stall_check_wins_over_its_time():
    environ = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "9", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert Config.from_environment(environ).stall_warning == 0.0


def test_an_empty_variable_counts_as_unset():
    environ = {"HVDLITE_FUSION_THRESHOLD": "", "HOROVOD_FUSION_THRESHOLD": "4", "HOROVOD_STALL_CHECK_DISABLE": ""}
    assert Config.from_environment(environ) == Config(fusion_threshold=4)


def test_foreign_names_are_ignored():
    environ = {
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_OF_A_TOOL": "x",
        "HVDLITE_TEST_MPICH_PYTHON": "/p",
        "HVDLITES": "x",
        "PATH": "/bin",
    }
    assert Config.from_environment(environ) == Config()


def test_a_misspelt_name_is_refused_with_the_nearest_match():
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({"HVDLITE_FUSION_TRESHOLD": "1"})
    assert str(caught.value) == ("unknown setting HVDLITE_FUSION_TRESHOLD='1'. Did you mean HVDLITE_FUSION_THRESHOLD?")


def test_all_misspelt_names_are_told_at_once():
    with pytest.raises(ConfigError, match=r"HVDLITE_LOG_LEVLE.*HVDLITE_LOG_LEVEL\?.*HVDLITE_QQQ.*settings\.md"):
        Config.from_environment({"HVDLITE_QQQ": "1", "HVDLITE_LOG_LEVLE": "info"})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("HVDLITE_FUSION_THRESHOLD", "64MB", "whole number of bytes, 0 or more"),
        ("HVDLITE_FUSION_THRESHOLD", "-1", "whole number of bytes, 0 or more"),
        ("HVDLITE_RING_CHUNK", "0", "whole number of bytes, 1 or more"),
        ("HVDLITE_STALL_WARNING", "1min", "number of seconds"),
        ("HVDLITE_STALL_WARNING", "nan", "number of seconds"),
        ("HVDLITE_STALL_WARNING", "inf", "number of seconds"),
        ("HVDLITE_SPIN", "-0.1", "number of seconds"),
        ("HVDLITE_SHARED_MEMORY", "maybe", "0 or 1"),
        ("HOROVOD_STALL_CHECK_DISABLE", "maybe", "0 or 1"),
        ("HVDLITE_BACKEND", "rng", "one of auto, shared_memory, hierarchical"),
        ("HOROVOD_LOG_LEVEL", "loud", "one of trace, debug"),
        ("HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE", "0", "whole number, 1 or more"),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.1", "number from 0 to 1"),
        ("HVDLITE_THREAD_AFFINITY", "0,,1", "core numbers separated by commas"),
    ],
)
def test_a_bad_value_is_told_with_name_value_kind_and_meaning(name, text, expected):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({name: text})
    assert str(caught.value).startswith(f"{name}={text!r}: expected {expected}")
    assert str(caught.value).endswith(")")


@pytest.mark.parametrize("values", [{"spin": -1}, {"backend": "rng"}, {"ring_chunk": 0}, {"fusion_threshold": 1.5}])
def test_a_bad_value_in_code_is_refused_too(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Config(**values)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().spin = 1.0  # type: ignore[misc]


def test_ranks_that_agree_pass():
    compare([Config(log_level=level, spin=1.0).fingerprint() for level in ("info", "error", "debug")])


def test_ranks_that_differ_are_told_settings_ranks_and_values():
    odd = Config(fusion_threshold=0, stall_warning=5.0)
    with pytest.raises(ConfigError) as caught:
        compare([Config().fingerprint(), odd.fingerprint(), Config().fingerprint()])
    message = str(caught.value)
    assert "HVDLITE_FUSION_THRESHOLD differs between ranks: 67108864 on ranks 0, 2; 0 on rank 1." in message
    assert "HVDLITE_STALL_WARNING differs between ranks: 60.0 on ranks 0, 2; 5.0 on rank 1." in message


def test_a_setting_that_one_rank_does_not_know_differs():
    other = Config().fingerprint()
    del other["ring_chunk"]
    with pytest.raises(ConfigError, match=r"RING_CHUNK differs between ranks: 61440 on rank 0; \(unknown\) on rank 1"):
        compare([Config().fingerprint(), other])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (4, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "3"}, (3, "PMI_SIZE")),
        ({"SLURM_NTASKS": "8"}, None),  # an allocation, but Slurm did not start this process
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (8, "SLURM_NTASKS")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (2, "SLURM_STEP_NUM_TASKS")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "5"}, (5, "OMPI_COMM_WORLD_SIZE")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "PMI_SIZE": "6"}, (6, "PMI_SIZE")),
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_the_most_specific_variable_says_how_many_ranks_were_announced(environ, expected):
    assert launcher_size(environ) == expected


def test_variables_that_the_user_set_are_left_alone(monkeypatch):
    monkeypatch.setenv("HVDLITE_TEST_ONE", "user")
    monkeypatch.setenv("HVDLITE_TEST_TWO", "soon gone")
    monkeypatch.delenv("HVDLITE_TEST_TWO")  # so that it is removed again afterwards
    config.apply_environment({"HVDLITE_TEST_ONE": "ours", "HVDLITE_TEST_TWO": "ours"})
    now = config.environment()
    assert (now["HVDLITE_TEST_ONE"], now["HVDLITE_TEST_TWO"]) == ("user", "ours")


def test_every_setting_has_a_meaning_and_a_unit():
    for field in dataclasses.fields(Config):
        one = field.metadata["knob"]
        assert one.help
        if "bytes" in one.kind.name:
            assert "bytes" in one.help, field.name
        if "seconds" in one.kind.name:
            assert "seconds" in one.help, field.name


def test_the_page_of_settings_is_current():
    assert (ROOT / "docs/reference/settings.md").read_text() == config.settings_reference(), "run `make docs`"
