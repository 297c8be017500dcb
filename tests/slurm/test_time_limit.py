"""A job that meets its time limit. It began with the first test of this folder."""

from __future__ import annotations


def test_the_time_limit_ends_all_ranks(slurm, job_with_a_limit):
    job, output = job_with_a_limit
    slurm.wait_for(job, ["TIMEOUT", "COMPLETED", "FAILED"], timeout=90)
    said = output.read_text()
    assert slurm.state(job)["JobState"] == "TIMEOUT", said
    assert "rank 0/2" in said and "rank 1/2" in said and "DUE TO TIME LIMIT" in said
    assert not slurm.processes(aside=True)
