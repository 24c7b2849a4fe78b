"""The benchmark beside other programs: the protocol, what is counted, what is refused."""

import stat
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(tmp_path, program: str):
    """A peer whose interpreter runs `program`, whatever its arguments are."""
    from peer_programs.process import Peer

    (tmp_path / "program.py").write_text(program)
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} -S {tmp_path}/program.py\n")
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    return Peer(str(interpreter), "any", "DigitCNN", tmp_path / "task", tmp_path / "log")


SERVING = """
import os, subprocess, sys, time
print('a library greets')
print('PEER "ready"', flush=True)
child = subprocess.Popen([sys.executable, "-S", "-c", '''
import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    print(flush=True)
sys.stdin.read()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for number, line in enumerate(sys.stdin):
    child.stdin.write(line); child.stdin.flush(); child.stdout.readline()
    print(f'noise\\nPEER [{number}.5, 2.0]', flush=True)
time.sleep(60)
"""


def test_a_peer_answers_round_by_round_and_its_children_count(tmp_path):
    import machine

    peer = start(tmp_path, SERVING)
    for _ in range(2):
        peer.a_round()
    peer.weigh()
    everyone = machine.tree(peer._process.pid)
    assert len(everyone) == 2
    assert peer.losses == [[0.5, 2.0], [1.5, 2.0]]
    assert all(0.18 <= sum(cpu) <= 0.5 for cpu in peer.cpu)
    assert peer.megabytes > 1
    peer._process.kill()  # it would wait for its patience to end
    peer.end()
    time.sleep(0.1)
    assert not any(Path(f"/proc/{one}/exe").exists() for one in everyone[:1])
