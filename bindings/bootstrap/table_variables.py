"""The job of the processes that share tables, and the variables by which hvdrun describes it to them.

hvdrun reads this module, so it does not open the core.
"""

from __future__ import annotations

from dataclasses import replace

from sirtaki.bindings.bootstrap.job import Job

# The number of servers, the address of their rendezvous, the number of a server, and the number of ranks.
SERVERS, TABLES, SERVER, SIZE = "SIRTAKI_SERVERS", "SIRTAKI_TABLES", "SIRTAKI_SERVER", "SIRTAKI_SIZE"
END = 0  # sent to a server in the place of a table's number: the ranks have ended


def job_of_tables(job: Job, servers: int) -> Job:
    """Returns the job in which the ranks of `job`, followed by its servers, share tables."""
    return replace(job, id=f"{job.id}-tables", size=job.size + servers)
