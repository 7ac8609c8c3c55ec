"""A Slurm cluster of two nodes on this machine; needs slurm-wlm, munge and root."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=20
KillWait=10
GresTypes=gpu
NodeName=node1 NodeHostname={host} Port={ports[1]} CPUs=8 Gres=gpu:1
NodeName=node2 NodeHostname={host} Port={ports[2]} CPUs=8 Gres=gpu:1
PartitionName=plain Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=0
PartitionName=grace Nodes=node[1-2] PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=node[1-2] PriorityTier=9 PreemptMode=OFF
"""


def can_run() -> bool:
    """Whether what it needs is there; names for the nodes can only be mounted by root."""
    return os.geteuid() == 0 and all(map(find, PROGRAMS))


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def wait_until(reached: Callable[[], object], seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


class Cluster:
    """Leaving the context ends the daemons."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        folder, host = self.folder, socket.gethostname()
        for name in ("state", "node1", "node2"):
            (folder / name).mkdir(parents=True)
        text = CONFIG.format(folder=folder, host=host, user=getpass.getuser(), ports=_free_ports(3))
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
        hosts = f"{Path('/etc/hosts').read_text()}\n127.0.0.1 node1 node2\n"
        (folder / "hosts").write_text(hosts)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid"}
        files |= {"seed-file": "seed"}
        flags = [f"--{flag}={folder}/munge.{ending}" for flag, ending in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *flags)
        wait_until((folder / "munge.socket").exists, 60)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in ("node1", "node2"):
            self.start_node(node)
        wait_until(lambda: self.run("sinfo", "-h", "-p", "plain", "-t", "idle", "-o", "%D") == "2")
        return self

    def __exit__(self, *exc_info) -> None:
        self.run("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full", check=False)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _start(self, name: str, program: str, *flags: str) -> None:
        # JAX reaches the first node by its name.
        mount = f'mount --bind {self.folder}/hosts /etc/hosts && exec {find(program)} "$@"'
        with open(self.folder / f"{name}.out", "a") as output:
            command = ["unshare", "--mount", "sh", "-c", mount, program, *flags]
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output
            )

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str, job: int) -> None:
        """As a loss of power does; the node is back 30 seconds later."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        for pid in self.processes(job, SLURMD_NODENAME=node):
            os.kill(pid, signal.SIGKILL)
        time.sleep(30)
        self.start_node(node)

    def processes(self, job: int, **environment: str) -> list[int]:
        """Of a job, those with these entries in their environment; not the daemons' own."""
        wanted = {f"{k}={v}" for k, v in (environment | {"SLURM_JOB_ID": str(job)}).items()}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= set((folder / "environ").read_text(errors="replace").split("\0")):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def run(self, *command: str | Path, cwd: Path | None = None, check: bool = True) -> str:
        done = subprocess.run(
            list(map(str, command)), env=self.environment, cwd=cwd, text=True, capture_output=True
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *arguments: str | Path, cwd: Path, **environment: str) -> int:
        """The id of a batch job on both nodes."""
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in environment.items())])
        size = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=1")
        return int(
            self.run("sbatch", "--parsable", f"--export={exported}", *size, *arguments, cwd=cwd)
        )

    def state(self, job: int) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode, .."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", str(job))))

    def wait(self, job: int, seconds: float = 1200) -> tuple[str, int, str]:
        """How a job ended: state, number of restarts, exit code:signal."""
        going_on = "PENDING RUNNING COMPLETING REQUEUED CONFIGURING PREEMPTED SIGNALING".split()
        wait_until(lambda: self.state(job)["JobState"] not in going_on, seconds)
        state = self.state(job)
        return state["JobState"], int(state["Restarts"]), state["ExitCode"]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
