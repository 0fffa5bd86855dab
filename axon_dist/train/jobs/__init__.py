"""Job files for schedulers: SLURM, Kubernetes' JobSet, SkyPilot.

`job.py` has the value that describes a job; each scheduler is one file that writes it, and a row of
`schedulers.py`.
"""

from .job import Job as Job
from .schedulers import SCHEDULERS as SCHEDULERS
from .schedulers import Scheduler as Scheduler
from .schedulers import check_job as check_job
from .schedulers import submit_job as submit_job
