"""The job of docs/howto/nvflare.md, in NVFlare's simulator."""

import os
import re
import subprocess
import sys

import pytest

import runs

pytestmark = pytest.mark.slow
PAGE = (runs.ROOT / "docs" / "howto" / "nvflare.md").read_text()
FILES = re.findall(r"```{code-block} python\n:caption: (\S+)\n\n(.*?)```", PAGE, re.DOTALL)


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
