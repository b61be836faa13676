"""What the background process does when a run cannot even be begun."""

from launch import supervisor
from vdpp_core import RunConfig
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run


def test_a_run_that_cannot_be_begun_has_its_reason_and_others_their_turn(tmp_path, monkeypatch, capsys):
    def fails(_):
        raise OSError("no more processes")

    monkeypatch.setattr(supervisor, "supervise", fails)
    folder = runfolder.create(RunConfig(output_dir=tmp_path / "run").for_ranks(1))
    supervisor._one_of(folder, sweep=None)
    assert Run(folder).result()["failure"]["cause"] == "could not be run: OSError: no more processes"
    supervisor._one_of(tmp_path / "taken away", sweep=None)
    assert capsys.readouterr().err.count("OSError: no more processes") == 2
