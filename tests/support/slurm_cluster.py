"""A real Slurm on this machine for tests: controller, accounting and two nodes of a core each, from Debian's packages.

python tests/support/slurm_cluster.py install      as root
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db")
PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server")
LIMITED = "limited"
"""Partition whose QOS lets a user submit nothing."""


def why_not() -> str | None:
    if os.getuid() != 0:
        return "a cluster of one machine is started by root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"needs {', '.join(missing)}: python tests/support/slurm_cluster.py install" if missing else None


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come: {what}"
        time.sleep(0.5)


class Cluster:
    """The cluster; all its files lie in one folder, and `stop` ends all that it started."""

    def __init__(self, home: Path) -> None:
        self.home, self.ports = home, free_ports(5)
        self.environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
        self.started: list[subprocess.Popen] = []
        for name in ("state", "spool-n1", "spool-n2", "db"):
            (home / name).mkdir()
        self._authenticate()
        self._write_configurations()
        self._start_database()
        self.daemon("dbd", "slurmdbd", "-D")
        wait_until(lambda: self.succeeds("sacctmgr", "-n", "show", "cluster"), "slurmdbd")
        for words in (
            ("add", "cluster", "test"),
            ("add", "account", "lab"),
            ("add", "user", "root", "account=lab"),
            ("add", "qos", LIMITED, "set", "MaxSubmitJobsPerUser=0"),
        ):
            self.succeeds("sacctmgr", "-i", *words)
        self.start_controller()
        self.daemon("n1", "slurmd", "-D", "-N", "n1")
        self.daemon("n2", "slurmd", "-D", "-N", "n2")
        self.wait_for_nodes()

    def daemon(self, name: str, *command: str) -> subprocess.Popen:
        """Start a daemon in the foreground, so that it is a child of this process."""
        with (self.home / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        self.started.append(process)
        return process

    def succeeds(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def says(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def wait_for_nodes(self) -> None:
        wait_until(lambda: self.says("sinfo", "-h", "-p", "cpu", "-o", "%T").split() == ["idle"], "two idle nodes")

    def start_controller(self) -> None:
        self.controller = self.daemon("ctld", "slurmctld", "-D")
        wait_until(lambda: self.succeeds("scontrol", "ping"), "slurmctld")

    def restart_controller(self) -> None:
        """End slurmctld, and start it again on what it has saved."""
        self.controller.terminate()
        self.controller.wait()
        self.start_controller()

    def stop(self) -> None:
        """End the jobs and all daemons, in the order in which they need each other."""
        self.succeeds("scancel", "--full", "--signal=KILL", "--user=root")
        self.succeeds("scancel", "--user=root")
        for process in reversed(self.started):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()

    def _authenticate(self) -> None:
        if self.succeeds("munge", "-n"):
            return
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        self.daemon("munge", "su", "-s", "/bin/bash", "munge", "-c", "exec munged --foreground")
        wait_until(lambda: self.succeeds("munge", "-n"), "munged")

    def _start_database(self) -> None:
        folder, sock = self.home / "db", self.home / "db.sock"
        subprocess.run(["mariadb-install-db", "--user=root", f"--datadir={folder}"], check=True, capture_output=True)
        address = [f"--port={self.ports[0]}", "--bind-address=127.0.0.1", f"--pid-file={self.home / 'db.pid'}"]
        self.daemon(
            "db", "mariadbd", "--no-defaults", "--user=root", f"--datadir={folder}", f"--socket={sock}", *address
        )
        wait_until(lambda: self.succeeds("mariadb", "-S", str(sock), "-u", "root", "-e", "select 1"), "mariadbd")
        users = ["slurm@localhost", "slurm@'127.0.0.1'"]
        words = [f"create user {user} identified by 'local'; grant all on slurm.* to {user};" for user in users]
        self.says("mariadb", "-S", str(sock), "-u", "root", "-e", "create database slurm;" + "".join(words))

    def _write_configurations(self) -> None:
        database, accounting, controller, *nodes = self.ports
        conf = self.home / "slurmdbd.conf"
        conf.write_text(f"""\
AuthType=auth/munge
DbdHost=localhost
DbdPort={accounting}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=local
StorageLoc=slurm
PidFile={self.home}/dbd.pid
""")
        conf.chmod(0o600)
        host = socket.gethostname()
        (self.home / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
StateSaveLocation={self.home}/state
SlurmdSpoolDir={self.home}/spool-%n
SlurmctldPidFile={self.home}/ctld.pid
SlurmdPidFile={self.home}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
MinJobAge=10
AccountingStorageEnforce=limits
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={accounting}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={nodes[0]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={nodes[1]} CPUs=1 State=UNKNOWN
PartitionName=cpu Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName={LIMITED} Nodes=n1 QOS={LIMITED} MaxTime=INFINITE State=UP
""")


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "install", "-y", "-qq", *PACKAGES], check=True)
