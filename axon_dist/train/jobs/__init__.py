"""Job files for schedulers: SLURM, Kubernetes' JobSet, SkyPilot.

`job.py` describes a job; each scheduler has a file that writes the job file, and an entry in
`schedulers.py`.
"""

from .job import Job as Job
from .schedulers import SCHEDULERS as SCHEDULERS
from .schedulers import Scheduler as Scheduler
from .schedulers import check_job as check_job
from .schedulers import submit_job as submit_job
