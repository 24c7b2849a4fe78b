"""The files of launch/flower that are not Python, and the job of docs/howto/nvflare.md."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import runs

LAUNCH = runs.ROOT / "launch" / "flower"


def call(script: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess:
    command = ["bash", str(LAUNCH / script), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_certificates_are_of_their_authority_for_the_hosts_and_nobody_else_reads_the_keys(tmp_path):
    if not (shutil.which("openssl") and shutil.which("ssh-keygen")):
        pytest.skip("openssl and ssh-keygen make certificates and keys")
    made = call("certificates.sh", "keys", "10.0.0.7", "fed.example", "--nodes", 2, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    keys = tmp_path / "keys"
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", keys / "ca.crt", keys / "server.pem"]
    for host in (["-verify_ip", "10.0.0.7"], ["-verify_hostname", "fed.example"]):
        subprocess.run([*verify[:2], *host, *verify[2:]], check=True, capture_output=True)
    other = subprocess.run(
        [*verify[:2], "-verify_ip", "10.0.0.8", *verify[2:]], capture_output=True
    )
    assert other.returncode != 0
    assert (keys / "node-1.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in keys.iterdir())
    again = call("certificates.sh", "keys", "localhost", folder=tmp_path)
    assert again.returncode == 2
    assert "has certificates already" in again.stderr


def test_the_app_has_every_key_of_the_run_config_with_its_default():
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")
    from fedjax_bn.flower.settings import Run, run_of

    app = tomllib.loads((LAUNCH / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert {key.replace("-", "_") for key in app["config"]} == set(Run._fields)
    given, default = run_of(app["config"]), Run()
    for key in ("time_limit", "attempts", "norm_bound", "serve_unseen"):
        assert getattr(given, key) == getattr(default, key)
    assert (LAUNCH / "LICENSE").read_text() == (runs.ROOT / "LICENSE").read_text()


PAGE = (runs.ROOT / "docs" / "howto" / "nvflare.md").read_text()
FILES = re.findall(r"```{code-block} python\n:caption: (\S+)\n\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", "fedavg"])
def test_the_job_of_the_page_gives_the_numbers_of_the_simulation(tmp_path, method):
    pytest.importorskip("nvflare", reason="NVFlare is not installed: pip install nvflare")
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")
    changes = f"quickstart:method={method},model=double_net:DoubleImageNet,"
    for name, text in FILES:
        (tmp_path / name).write_text(text.replace("quickstart:", changes))
    path = os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests" / "support")])
    env = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": path}

    def run(name):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run([sys.executable, name], cwd=tmp_path, env=env, timeout=600, **pipes)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    run("job.py")
    printed = run("check.py").splitlines()[-1]
    *weights, difference = map(float, printed.replace("[", "").replace("]", "").split())
    assert weights == pytest.approx([2 / 3, 1 / 3])
    assert difference < 1e-13
