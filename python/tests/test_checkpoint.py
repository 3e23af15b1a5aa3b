"""Checkpoints and safetensors files as arrays."""

import json
import struct
import subprocess

import numpy as np
import pytest

import echelon


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """The same training saved by one rank and by four, which write parts."""
    request = {"model": "llama-tiny", "seq_len": 16, "global_batch": 4, "micro_batch": 2, "threads": 1, "steps": 2,
               "sample": 0, "precision": "f64"}  # fmt: skip
    one = tmp_path_factory.mktemp("one")
    four = tmp_path_factory.mktemp("four")
    echelon.train(text, checkpoint=one, **request)
    echelon.train(text, checkpoint=four, dp=2, tp=2, zero=1, **request)
    return one, four


def test_names_and_shapes_are_the_models(saved):
    for path in saved:
        checkpoint = echelon.open_checkpoint(path)
        assert isinstance(checkpoint, echelon.Checkpoint)
        assert (checkpoint.step, checkpoint.model.name, checkpoint.dtype) == (2, "llama-tiny", "f64")
        for parameter in checkpoint.model.parameters():
            assert list(checkpoint[parameter.name].shape) == parameter.shape
            assert list(checkpoint[parameter.name + ".exp_avg_sq"].shape) == parameter.shape
        assert checkpoint.verify()["tensors"] == len(checkpoint)
        with pytest.raises(KeyError):
            checkpoint["lm_head.wait"]


def test_whatever_mesh_saved_them(saved):
    one, four = map(echelon.open_checkpoint, saved)
    assert set(one) == set(four)
    differences = one.diff(four)
    for name in one:
        scale = np.abs(one[name]).max()
        assert np.abs(one[name] - four[name]).max() == pytest.approx(differences.get(name, 0) * scale, rel=1e-12)
        assert np.abs(one[name] - four[name]).max() <= 1e-9 * max(scale, 1e-30)


def test_no_copy_of_what_is_stored_whole(saved):
    checkpoint = echelon.open_checkpoint(saved[0])
    name = "model.norm.weight"
    first, second = checkpoint[name], checkpoint[name]
    assert np.shares_memory(first, second) and not first.flags.owndata
    assert np.shares_memory(np.from_dlpack(checkpoint.tensor(name)), first)
    before = checkpoint.read(name).numpy().copy()
    first[:] = 7  # in this process alone
    assert (second == 7).all()
    assert (checkpoint.read(name).numpy() == before).all()
    assert (echelon.open_checkpoint(saved[0])[name] == before).all()


def test_arrays_outlive_the_checkpoint(saved):
    array = echelon.open_checkpoint(saved[0])["model.norm.weight"]
    assert np.isfinite(array).all()


def test_a_file_that_replaces_it_is_another(tmp_path):
    """What was opened is read, also where the first access comes after it."""
    (tmp_path / "later").mkdir()
    path, other = tmp_path / "one.safetensors", tmp_path / "later" / "one.safetensors"
    echelon.save_safetensors(path, {"a": np.arange(8), "b": np.arange(8, 16)})
    echelon.save_safetensors(other, {"b": np.zeros(8, np.int64), "a": np.ones(8, np.int64)}, {"a longer": "header"})
    of_file, of_directory = echelon.open_checkpoint(path), echelon.open_checkpoint(tmp_path)
    other.replace(path)
    for opened in (of_file, of_directory):
        assert opened["a"].tolist() == list(range(8)) and opened["b"].tolist() == list(range(8, 16))
    assert echelon.open_checkpoint(path)["a"].tolist() == [1] * 8


def test_equals_what_is_exported(binary, saved, tmp_path):
    for place, path in enumerate(saved):
        out = tmp_path / f"hf{place}"
        subprocess.run([binary, "checkpoint", "export", path, "--out", out], check=True, capture_output=True)
        exported, checkpoint = echelon.open_checkpoint(out), echelon.open_checkpoint(path)
        assert len(exported) > 10
        for name in exported:
            assert (exported[name] == checkpoint[name]).all(), name
        assert echelon.Model(str(out)).num_parameters == checkpoint.model.num_parameters


def test_a_damaged_one_is_refused(saved, tmp_path):
    copy = tmp_path / "step-00000002"
    copy.mkdir()
    for file in (saved[0] / "step-00000002").iterdir():
        data = bytearray(file.read_bytes())
        if file.name == "model.safetensors":
            data[-1] ^= 1
        (copy / file.name).write_bytes(data)
    checkpoint = echelon.open_checkpoint(copy)
    with pytest.raises(echelon.RequestError, match="safetensors"):
        checkpoint.verify()
    damaged = []
    for name in checkpoint:
        try:
            checkpoint.read(name)
        except echelon.RequestError as refusal:
            damaged.append(name)
            assert name in str(refusal)
    assert len(damaged) == 1


def test_what_is_none(tmp_path):
    for path in [tmp_path, tmp_path / "nowhere", __file__, bytes(tmp_path)]:
        with pytest.raises(echelon.RequestError):
            echelon.open_checkpoint(path)
    with pytest.raises(echelon.RequestError, match="a character of code 0"):
        echelon.open_checkpoint(f"{tmp_path}\0")
    with pytest.raises(TypeError, match="expected str, bytes or os.PathLike"):
        echelon.open_checkpoint(5)


def test_written_and_read_again(tmp_path):
    path = tmp_path / "some.safetensors"
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(24, dtype=np.int64).reshape(2, 3, 4).transpose(2, 0, 1),
        "none": np.zeros((0, 3), np.float16),
        "one": np.array(True),
    }
    echelon.save_safetensors(path, arrays, {"by": "a test"})
    read = echelon.open_checkpoint(path)
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
        assert (read[name] == array).all()
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"] == {"by": "a test"}
    again = tmp_path / "again.safetensors"
    echelon.save_safetensors(again, {name: read.tensor(name) for name in read}, {"by": "a test"})
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(echelon.RequestError, match="complex64"):
        echelon.save_safetensors(path, {"a": np.zeros(3, np.complex64)})
    with pytest.raises(echelon.RunError):
        echelon.save_safetensors(tmp_path / "nowhere" / "a.safetensors", arrays)


@pytest.mark.parametrize(
    "tensors, metadata, field",
    [
        ({"__metadata__": np.zeros(3)}, None, "tensors"),
        ({3: np.zeros(3)}, None, "tensors"),
        ({"a": np.zeros(3)}, {"step": 3}, "metadata"),
        ({"a": np.zeros(3)}, {3: "step"}, "metadata"),
    ],
)
def test_names_that_no_file_has(tmp_path, tensors, metadata, field):
    with pytest.raises(echelon.RequestError) as refusal:
        echelon.save_safetensors(tmp_path / "a.safetensors", tensors, metadata)
    assert refusal.value.field == field and not list(tmp_path.iterdir())


@pytest.fixture
def narrow(tmp_path):
    """A file of bf16: 1, -2.5 and 0.15625, which bf16 has exactly."""
    path = tmp_path / "narrow.safetensors"
    raw = (np.array([1, -2.5, 0.15625], np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    echelon.save_safetensors(path, {"x": echelon.Tensor("x", "BF16", [3], raw)})
    return path


def test_bf16_is_widened(narrow):
    tensors = echelon.open_checkpoint(narrow)
    assert tensors.tensor("x").dtype == "BF16"
    assert tensors["x"].dtype == np.float32 and tensors["x"].tolist() == [1, -2.5, 0.15625]
    assert np.asarray(tensors.tensor("x")).tolist() == [1, -2.5, 0.15625]
    with pytest.raises(TypeError, match="BF16"):
        tensors.tensor("x").numpy()


def test_torch_shares_the_memory(narrow, saved):
    torch = pytest.importorskip("torch")
    tensor = echelon.open_checkpoint(narrow).tensor("x")
    x = torch.from_dlpack(tensor)
    assert x.dtype == torch.bfloat16 and x.tolist() == [1, -2.5, 0.15625]
    x[0] = 3
    assert tensor.float32()[0] == 3
    array = echelon.open_checkpoint(saved[0])["model.norm.weight"]
    assert torch.from_numpy(array).data_ptr() == array.ctypes.data
    assert torch.from_dlpack(array).shape == array.shape
