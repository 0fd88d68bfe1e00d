"""Registration, refusal and the start-up probe, against vLLM's real registry, platform and CLI."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch
from host_fakes import Layer
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import kvtile
import kvtile.vllm
from kvtile.vllm import check, host, probe


@pytest.fixture(autouse=True)
def registry():
    yield
    AttentionBackendEnum.TURBOQUANT.clear_override()


def selector(**features):
    return AttentionSelectorConfig(**{
        "head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "turboquant_4bit_nc",
        "block_size": 32, **features})


def test_entry_points_are_declared():
    points = {(p.group, p.value) for group in ("vllm.general_plugins", "vllm.platform_plugins")
              for p in importlib.metadata.entry_points(group=group) if p.name == "kvtile"}
    assert points == {("vllm.general_plugins", "kvtile.vllm:register"),
                      ("vllm.platform_plugins", "kvtile.vllm:platform")}


def test_the_cpu_platform_is_ours_and_answers_for_these_dtypes_only():
    assert f"{type(current_platform).__module__}.{type(current_platform).__name__}" == (
        kvtile.vllm.CPU_PLATFORM)
    assert current_platform.get_attn_backend_cls(None, selector()) == kvtile.vllm.BACKEND
    assert current_platform.get_attn_backend_cls(
        None, selector(use_batch_invariant=True)) == kvtile.vllm.BACKEND
    assert "CPUAttentionBackend" in current_platform.get_attn_backend_cls(
        None, selector(kv_cache_dtype="auto"))


@pytest.mark.parametrize("features,named", (
    ({"use_mla": True}, "MLA"), ({"use_mm_prefix": True}, "multimodal"),
    ({"use_non_causal": True}, "non-causal"),
    ({"use_per_head_quant_scales": True}, "per-head quant scales")))
def test_selection_refuses_what_is_outside_by_name(features, named):
    with pytest.raises(ValueError, match=named):
        current_platform.get_attn_backend_cls(None, selector(**features))


def test_register_is_idempotent_and_in_the_hosts_registry():
    assert not kvtile.vllm.active()
    assert kvtile.vllm.register() and kvtile.vllm.register()
    assert kvtile.vllm.active()
    assert AttentionBackendEnum.TURBOQUANT.get_class().__name__ == "KvtileBackend"


def test_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("KVTILE_VLLM", "0")
    assert kvtile.vllm.register() is False and kvtile.vllm.platform() is None
    assert not AttentionBackendEnum.TURBOQUANT.is_overridden() and not caplog.records


@pytest.mark.parametrize("found", ("0.23.4", "0.33.0", "1.0.0", "0.33.1+cpu", "dev"))
def test_untested_versions_are_left_alone_with_one_line(monkeypatch, found):
    lines = []
    monkeypatch.setattr(host, "version", lambda: found)
    monkeypatch.setattr(kvtile.vllm.logger, "warning", lambda text, *a: lines.append(text % a))
    assert kvtile.vllm.register() is False and kvtile.vllm.platform() is None
    assert lines == [f"kvtile is not active: vLLM {found} is outside the tested range, "
                     f"{host.TESTED_TEXT}"]
    assert not AttentionBackendEnum.TURBOQUANT.is_overridden()


@pytest.mark.parametrize("found", ("0.24.0", "0.32.0", "0.32.1", "0.31.0+cu130", "0.32.0rc1"))
def test_tested_versions(monkeypatch, found):
    monkeypatch.setattr(host, "version", lambda: found)
    assert host.refusal() is None


@pytest.mark.parametrize("mode", ("1", "tiled"))
def test_asked_for_and_impossible_fails_the_start(monkeypatch, mode):
    monkeypatch.setenv("KVTILE_VLLM", mode)
    monkeypatch.setattr(host, "version", lambda: "0.9.0")
    with pytest.raises(RuntimeError, match=f"KVTILE_VLLM={mode}, but vLLM 0.9.0 is outside"):
        kvtile.vllm.register()


def test_tiled_mode_patches_the_stock_backend_and_registers_nothing(monkeypatch):
    monkeypatch.setenv("KVTILE_VLLM", "tiled")
    monkeypatch.setenv("KVTILE_VLLM_TILE_TOKENS", "8192")
    assert kvtile.vllm.register() is False
    assert not AttentionBackendEnum.TURBOQUANT.is_overridden()
    assert kvtile.vllm.uninstall() is True


@pytest.mark.parametrize("name,value", (("KVTILE_VLLM", "yes"), ("KVTILE_VLLM_TILE_TOKENS", "32k")))
def test_bad_switches_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: got '{value}'"):
        host.mode(), host.tile_tokens()


@pytest.mark.parametrize("shape,expected", (
    (lambda *a: (3, 16, 7, 134), False), (lambda *a: (3, 7, 16, 134), True)))
def test_page_order_is_read_from_the_hosts_cache_shape(shape, expected):
    assert host.head_major(type("Backend", (), {"get_kv_cache_shape": staticmethod(shape)})) is (
        expected)


def test_unknown_cache_shapes_are_refused():
    with pytest.raises(RuntimeError, match=r"\(2, 3, 16, 7, 64\)"):
        host.head_major(type("Backend", (), {
            "get_kv_cache_shape": staticmethod(lambda *a: (2, 3, 16, 7, 64))}))


@pytest.mark.parametrize("wrong", ("order", "flavour", "elsewhere", "nothing"))
def test_the_probe_refuses_a_store_that_writes_other_bytes(wrong, monkeypatch):
    monkeypatch.setattr(probe, "_passed", set())
    layer = Layer("turboquant_k8v4", 4, 2, 64)
    store = layer.impl.do_kv_cache_update

    def other(layer_, key, value, pages, slots):
        if wrong == "order":
            store(layer_, key.flip(1), value, pages, slots)
        elif wrong == "flavour":
            cache = layer.impl.paged(pages)
            kvtile.encode(key, value, kvtile.PagedCache(
                pages, kvtile.SlotFormat("k8v4", 64, "e4b15"), cache.layout), slots)
        elif wrong == "elsewhere":
            store(layer_, key, value, pages, slots)
            store(layer_, key, value, pages, slots - slots[0])

    layer.impl.do_kv_cache_update = other
    with pytest.raises(RuntimeError, match="wrote outside" if wrong == "elsewhere" else
                       "the keys of vLLM .* read back with a relative error"):
        probe.probe_store(layer, 16, torch.float32, torch.device("cpu"))
    layer.impl.do_kv_cache_update = store
    probe.probe_store(layer, 16, torch.float32, torch.device("cpu"))


def test_check_says_what_would_run(capsys):
    assert check.main(["--shape", "9/3/64", "--rows", "2048", "--seqs", "8"]) == 0
    text = capsys.readouterr().out
    assert f"vLLM {host.version()}; tested with {host.TESTED_TEXT}" in text
    assert "active: backend kvtile.vllm.backend.KvtileBackend, head-major caches, path cpu" in text
    need = max(kvtile.workspace_bytes(
        kvtile.SlotFormat("4bit_nc", 64), total_q=2048, num_seqs=8, num_heads=9, num_kv_heads=3,
        block_size=16, chunk=chunk) for chunk in (False, True))
    assert (f"turboquant_4bit_nc, 9 heads over 3 of 64: workspace {need / 2**20:.1f} MiB whatever "
            "the context") in text


def test_check_on_an_unsupported_version(monkeypatch, capsys):
    monkeypatch.setattr(host, "version", lambda: "0.40.0")
    assert check.main([]) == 1
    assert "not active: vLLM 0.40.0 is outside the tested range" in capsys.readouterr().out


def test_check_of_the_tiled_mode(monkeypatch, capsys):
    monkeypatch.setenv("KVTILE_VLLM", "tiled")
    monkeypatch.setenv("KVTILE_VLLM_TILE_TOKENS", "4096")
    assert check.main([]) == 0
    assert "KVTILE_VLLM=tiled: vLLM's own backend, 4096 cached tokens" in capsys.readouterr().out


def test_check_from_the_shell():
    done = subprocess.run([sys.executable, "-m", "kvtile", "vllm-check", "--shape", "32/8"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "got 32/8, wanted HEADS/KV_HEADS/HEAD_DIM" in done.stderr
    done = subprocess.run([sys.executable, "-m", "kvtile", "vllm-check"], capture_output=True,
                          text=True, env={**os.environ, "KVTILE_VLLM": "0"})
    assert done.returncode == 1 and "not active: KVTILE_VLLM=0" in done.stdout
