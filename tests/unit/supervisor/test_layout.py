import os
import socket
from pathlib import Path

from quire.supervisor import ports
from quire.supervisor.layout import LIVENESS, PortUse, ServiceSpec, lay_out
from quire.supervisor.listeners import Listener, listeners
from quire.supervisor.options import ModelChoice, Ports, UpOptions
from services.common.settings import load
from services.scheduler.settings import SchedulerSettings

TWO = (ModelChoice("a", "x"), ModelChoice("b", "y"))


def flag(spec: ServiceSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def test_order_and_addresses() -> None:
    specs = lay_out(UpOptions(spare_executors=0), cores=4)
    assert [spec.name for spec in specs] == ["kvmanager", "executor", "scheduler", "gateway"]
    kvmanager, executor, scheduler, gateway = specs
    assert flag(executor, "--kvmanager") == kvmanager.target
    assert flag(scheduler, "--kvmanager") == kvmanager.target
    assert flag(scheduler, "--executors") == executor.target
    assert flag(gateway, "--scheduler") == scheduler.target
    assert gateway.target == "127.0.0.1:50051"


def test_models_times_replicas_then_spares() -> None:
    specs = [s for s in lay_out(UpOptions(models=TWO, executors=2, spare_executors=1), 8) if s.role == "executor"]
    held = [flag(spec, "--model-name") if "--model" in spec.command else None for spec in specs]
    assert held == ["a", "a", "b", "b", None]
    assert flag(specs[0], "--model") == "x"
    assert [spec.health_service for spec in specs] == ["", "", "", "", LIVENESS]
    assert len({spec.name for spec in specs}) == 5


def test_executors_share_the_cores_and_others_stay_single_threaded() -> None:
    specs = lay_out(UpOptions(models=TWO, executors=2), cores=8)
    assert {flag(spec, "--threads") for spec in specs if spec.role == "executor"} == {"2"}
    assert all(spec.environment["OMP_NUM_THREADS"] == "1" for spec in specs if spec.role != "executor")
    (single, _spare) = (s for s in lay_out(UpOptions(), cores=1) if s.role == "executor")
    assert flag(single, "--threads") == "1"


def test_formats_by_age_reach_every_executor_where_they_are_asked_for() -> None:
    specs = [s for s in lay_out(UpOptions(models=TWO, kv="hot+warm"), cores=4) if s.role == "executor"]
    assert {flag(spec, "--kv") for spec in specs} == {"hot+warm"}
    assert all("--kv" not in spec.command for spec in lay_out(UpOptions(), cores=4))


def test_drafts_reach_executors_and_how_many_the_scheduler() -> None:
    specs = lay_out(UpOptions(draft="early-exit:3", speculation="4"), cores=4)
    assert {flag(spec, "--draft") for spec in specs if spec.role == "executor"} == {"early-exit:3"}
    (scheduler,) = (spec for spec in specs if spec.role == "scheduler")
    assert flag(scheduler, "--speculation") == "4"
    assert load(SchedulerSettings, "scheduler", scheduler.command[5:]).speculation == "4"
    assert all("--draft" not in spec.command for spec in lay_out(UpOptions(), cores=4))


def test_lower_tiers_reach_every_executor_where_they_are_asked_for() -> None:
    options = UpOptions(models=TWO, kv_disk="/d", kv_disk_size="1GiB")
    specs = [s for s in lay_out(options, cores=4) if s.role == "executor"]
    assert {(flag(spec, "--kv-disk"), flag(spec, "--kv-disk-size")) for spec in specs} == {("/d", "1GiB")}


def test_aliases_reach_the_scheduler() -> None:
    specs = lay_out(UpOptions(models=TWO, aliases=("auto=a@output=..9,b", "any=b,a")), cores=4)
    (scheduler,) = (spec for spec in specs if spec.role == "scheduler")
    settings = load(SchedulerSettings, "scheduler", scheduler.command[5:])
    assert settings.aliases == ("auto=a@output=..9,b", "any=b,a")


def test_no_port_is_used_twice() -> None:
    options = UpOptions(models=TWO, executors=3, ports=Ports.from_base(30000))
    used = [use.port for spec in lay_out(options, 2) for use in spec.ports]
    assert len(used) == len(set(used)) == 2 * (3 + 7) + 1


def test_a_taken_port_is_named_with_its_holder_and_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = ServiceSpec("gateway", "gateway", (), "", (PortUse(port, "--http-port", "HTTP"),))
        far = ServiceSpec("scheduler", "scheduler", (), "", (PortUse(70000, "--scheduler-port", "gRPC"),))
        found = ports.problems([service, far])
    assert found[0] == "scheduler gRPC port 70000 is not in 1..65535; change it with --scheduler-port"
    assert found[1].startswith(f"port {port} is taken by ")
    assert found[1].endswith(f" (process {os.getpid()}); --http-port PORT moves it, --port-base PORT moves all ports")
    assert len(found) == 2


def test_many_taken_ports_are_one_line() -> None:
    taken = [PortUse(port, "--flag", "gRPC") for port in (50053, 8000, 50051, 50052, 9101)]
    holders = [Listener(7, "Quire"), Listener(8, "nginx"), Listener(9, "Quire")]
    moved = "--port-base PORT moves all ports"
    assert ports.describe_taken(taken, holders) == (
        f"ports 8000, 9101, 50051-50053 are taken by Quire (processes 7, 9) and nginx (process 8); {moved}"
    )
    assert ports.describe_taken(taken[:2], []) == f"ports 8000, 50053 are taken; {moved}"


def test_who_listens_is_read_from_proc(tmp_path: Path) -> None:
    table = "  sl  local_address rem_address   st ...\n"
    for line, (address, state, inode) in enumerate([("0100007F:1F90", "0A", 71), ("0100007F:1F90", "01", 72)]):
        table += (
            f"   {line}: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  1000 0 {inode} 1\n"
        )
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(table)
    programs = [(5, "python3", "python3\0-m\0quire.cli\0serve\0", 71), (6, "curl", "curl\0", 72), (7, "nginx", "", 71)]
    for pid, name, command, inode in programs:
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "cmdline").write_text(command)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (tmp_path / "8").mkdir()  # of somebody else
    assert listeners([8080], tmp_path) == [Listener(5, "Quire"), Listener(7, "nginx")]
    assert listeners([80], tmp_path) == []
    assert listeners([8080], tmp_path / "absent") == []


def test_a_port_given_twice_is_named() -> None:
    specs = lay_out(UpOptions(ports=Ports(http=50051)), 2)
    assert any("is the gateway gRPC's too; change one with --http-port" in line for line in ports.problems(specs))


def numa_flags(options: UpOptions, cores: int, node_cores: dict[int, int]) -> list[tuple[str, str]]:
    """Node ("" for none) and threads of each executor."""
    executors = [spec for spec in lay_out(options, cores, node_cores) if spec.role == "executor"]
    return [
        (flag(spec, "--numa-node") if "--numa-node" in spec.command else "", flag(spec, "--threads"))
        for spec in executors
    ]


def test_executors_go_round_the_nodes_and_share_their_cores() -> None:
    options = UpOptions(executors=3, spare_executors=2)
    assert numa_flags(options, 20, {0: 12, 2: 8}) == [("0", "6"), ("2", "8"), ("0", "6"), ("2", "8"), ("0", "6")]


def test_two_models_take_a_node_each() -> None:
    assert numa_flags(UpOptions(models=TWO, spare_executors=0), 8, {0: 4, 1: 4}) == [("0", "4"), ("1", "4")]


def test_fewer_executors_than_nodes_leave_no_node_idle() -> None:
    assert numa_flags(UpOptions(spare_executors=1), 8, {0: 4, 1: 4}) == [("", "8"), ("", "8")]
    assert numa_flags(UpOptions(executors=3, spare_executors=0), 16, dict.fromkeys(range(4), 4)) == [("", "5")] * 3


def test_one_node_is_nothing_to_choose() -> None:
    assert numa_flags(UpOptions(executors=2, spare_executors=0), 8, {0: 8}) == [("", "4"), ("", "4")]


def test_more_executors_than_cores_of_a_node_have_a_thread_each() -> None:
    assert numa_flags(UpOptions(executors=4, spare_executors=0), 2, {0: 1, 1: 1}) == [
        ("0", "1"),
        ("1", "1"),
        ("0", "1"),
        ("1", "1"),
    ]


def test_keys_reach_the_gateway_where_there_are_any() -> None:
    specs = {spec.role: spec for spec in lay_out(UpOptions(keys="/k.toml"), cores=4)}
    assert flag(specs["gateway"], "--keys") == "/k.toml"
    assert all("--keys" not in spec.command for role, spec in specs.items() if role != "gateway")
    assert all("--keys" not in spec.command for spec in lay_out(UpOptions(), cores=4))
