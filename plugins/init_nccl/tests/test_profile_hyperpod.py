"""``instep check --profile hyperpod-1.0.0``: installed against the manifest, and what a difference means for recovery."""

import subprocess
import sys
from pathlib import Path

import libraries
import pytest
from efa_machine import build

from instep.profiles import Finding, Inspection, Status
from instep_init_nccl import profile_hyperpod as hyperpod
from instep_init_nccl.machine import Machine
from instep_init_nccl.profile_versions import ask_nccl, nccl, numbers

CONTAINER = {
    "torch": "2.6.0+cu129",
    "nvidia-cuda-runtime-cu12": "12.9.79",
    "nvidia-nccl-cu12": "2.27.5",
    "megatron-core": "0.15.0",
    "nemo-toolkit": "2.6.0rc0",
}


def install(site: Path, name: str, version: str) -> None:
    """A distribution as an installer leaves it; torch and NCCL with the files that are looked at."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if name == "torch":
        (site / "torch").mkdir()
        (site / "torch" / "version.py").write_text(f"cuda: Optional[str] = {'12.9' if '+cu' in version else None!r}\n")
    if "nccl" in name:
        library = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
        library.parent.mkdir(parents=True)
        library.write_text("no library")
        (info / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others on the search path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def look(root: Path, **environ: str) -> dict[str, Finding]:
    return {finding.what: finding for finding in hyperpod.profile(Inspection(environ, root=root))}


def test_the_container_itself_is_as_in_the_manifest(site: Path, tmp_path: Path) -> None:
    for name, version in CONTAINER.items():
        install(site, name, version)
    findings = look(build(tmp_path / "root"))
    assert {finding.what: finding.status for finding in findings.values()} == dict.fromkeys(
        ("PyTorch", "CUDA", "NCCL", "EFA installer", "AWS-OFI-NCCL", "libfabric", "Megatron", "NeMo"), "ok"
    )
    assert [finding.what for finding in findings.values() if "as in the manifest" not in finding.value] == []


def test_another_toolkit_comes_from_its_own_file(site: Path, tmp_path: Path) -> None:
    root = build(tmp_path / "root")
    (root / "usr/local/cuda").mkdir(parents=True)
    (root / "usr/local/cuda/version.json").write_text('{"cuda" : {"name" : "CUDA SDK", "version" : "13.0.1"}}')
    finding = look(root)["CUDA"]
    assert (finding.value, finding.source) == ("13.0.1; the manifest has 12.9", "/usr/local/cuda/version.json")
    assert finding.status == "warn"


@pytest.mark.parametrize(
    ("version", "status", "part"),
    [
        (None, "fail", "gloo only"),
        ("2.17.1", "fail", "cannot be aborted"),
        ("2.21.5", "warn", "one root for each communicator"),
        ("2.23.4", "ok", "harmless"),
        ("2.27.5", "ok", "ends by abort"),
        ("2.29.2", "ok", "ncclCommRevoke"),
    ],
)
def test_what_a_version_of_nccl_means(version: str | None, status: Status, part: str) -> None:
    judged, why, remedy = hyperpod.nccl_version(version)
    assert judged == status
    assert part in why
    assert (remedy is None) == (status == "ok")


@pytest.mark.parametrize(
    ("version", "status", "part"),
    [("2.5.1+cu124", "fail", "instep needs 2.6"), ("2.13.0+cpu", "fail", "has no CUDA"), ("2.9.1+cu128", "ok", "newer is harmless")],
)
def test_what_a_version_of_torch_means(version: str, status: str, part: str, site: Path, tmp_path: Path) -> None:
    install(site, "torch", version)
    finding = look(tmp_path / "bare")["PyTorch"]
    assert (finding.status, finding.value) == (status, f"{version}; the manifest has 2.6.0")
    assert part in finding.why


def test_a_bare_machine_recovers_over_tcp(site: Path, tmp_path: Path) -> None:
    findings = look(tmp_path / "bare", HPCT_USE_ROOTLESS="1")
    for name in ("EFA installer", "AWS-OFI-NCCL", "libfabric"):
        assert findings[name].status == "warn"
        assert "recovery works as well" in findings[name].why
        assert findings[name].remedy == "instep check --profile efa"
    assert findings["HPCT_USE_ROOTLESS"].status == "warn"
    assert "does nothing" in findings["HPCT_USE_ROOTLESS"].why


@pytest.mark.parametrize(("version", "status"), [("1.12.1", "warn"), ("1.16.0", "ok"), ("1.19.0", "ok")])
def test_an_older_plugin_is_told_and_a_newer_one_is_harmless(version: str, status: Status) -> None:
    assert hyperpod.fabric("aws-ofi-nccl", "1.16.0")(version)[0] == status


def test_a_library_that_cannot_be_loaded_leaves_its_metadata(site: Path, tmp_path: Path) -> None:
    install(site, "nvidia-nccl-cu12", "2.27.5")
    assert nccl(Machine(tmp_path)) == ("2.27.5", "metadata of nvidia-nccl-cu12")


@pytest.mark.parametrize("library", libraries.found() or [None], ids=lambda path: path.parent.name if path else "none")
def test_a_real_library_tells_its_version(library: Path | None) -> None:
    if library is None:
        pytest.skip("no libnccl was fetched; `make test-nccl` does")
    assert ask_nccl(library) == library.parent.name


@pytest.mark.parametrize(
    ("text", "parts"), [("2.6.0rc0", (2, 6, 0)), ("12.9", (12, 9)), ("2.1.0amzn3.0", (2, 1, 0)), ("2.6.0+cu129", (2, 6, 0)), ("git", ())]
)
def test_numbers_of_a_version(text: str, parts: tuple[int, ...]) -> None:
    assert numbers(text) == parts


@pytest.mark.parametrize("profile", ["efa", "hyperpod-1.0.0"])
def test_no_profile_imports_torch(profile: str, tmp_path: Path) -> None:
    program = (
        "import sys; from instep.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit(3 if {'torch', 'numpy'} & {name.partition('.')[0] for name in sys.modules} else code)"
    )
    command = [sys.executable, "-c", program, "check", "--json", "--profile", profile]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert ran.returncode in {0, 1}, ran.stderr
    assert '"findings": [' in ran.stdout
