"""efla.patch_fla() on modules that look like fla's, and on fla where it is installed."""

import importlib.util
import sys
import types

import efla
import pytest

FUNCTIONS = {
    "fla.ops.delta_rule": ["chunk_delta_rule", "fused_recurrent_delta_rule"],
    "fla.ops.gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
}


@pytest.fixture
def fla(monkeypatch):
    """Modules as fla has them: functions defined once and imported elsewhere by name."""
    modules = {
        name: types.ModuleType(name)
        for name in ("fla", "fla.ops", *FUNCTIONS, "fla.layers", "fla.layers.delta_net")
    }
    for home, names in FUNCTIONS.items():
        for name in names:
            function = types.FunctionType((lambda: None).__code__, {}, name)
            setattr(modules[home], name, function)
            setattr(modules["fla.ops"], name, function)
    layer = modules["fla.layers.delta_net"]
    layer.chunk_delta_rule = modules["fla.ops"].chunk_delta_rule
    layer.renamed = modules["fla.ops"].chunk_gated_delta_rule
    layer.chunk_size = 64
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules
    efla.unpatch_fla()


def test_every_place_is_replaced_and_restored(fla):
    layer = fla["fla.layers.delta_net"]
    theirs = layer.chunk_delta_rule
    changed = efla.patch_fla()
    assert len(changed) == 10 and "fla.layers.delta_net.renamed" in changed
    for home, names in FUNCTIONS.items():
        for name in names:
            assert getattr(fla[home], name) is getattr(fla["fla.ops"], name) is getattr(efla, name)
    assert layer.chunk_delta_rule is efla.chunk_delta_rule
    assert layer.renamed is efla.chunk_gated_delta_rule and layer.chunk_size == 64
    assert efla.patch_fla() == []
    efla.unpatch_fla()
    assert layer.chunk_delta_rule is theirs is fla["fla.ops"].chunk_delta_rule
    assert len(efla.patch_fla()) == 10


def test_without_fla(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=r"needs flash-linear-attention: pip install flash-lin"):
        efla.patch_fla()


@pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed"
)
def test_flas_layers_use_the_kernels():
    try:
        changed = efla.patch_fla()
    except ImportError as error:  # without a driver for triton
        pytest.skip(f"fla cannot be imported: {error}")
    try:
        assert "fla.layers.delta_net.chunk_delta_rule" in changed
        assert "fla.layers.gated_deltanet.chunk_gated_delta_rule" in changed
    finally:
        efla.unpatch_fla()
