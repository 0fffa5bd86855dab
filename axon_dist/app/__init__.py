"""What a verb of the command does: run, resume, report, verify, examine, load, evaluate, export.

Imports every room below `cli`. Start reading in `build.py`, then `run.py`.
"""

from .build import Run as Run
from .build import abstract_batch as abstract_batch
from .build import build_loader as build_loader
from .build import build_run as build_run
from .build import build_step as build_step
from .build import build_world as build_world
from .build import model_of as model_of
from .build import step_for as step_for
from .check_data import DataCheck as DataCheck
from .check_data import check_data as check_data
from .directory import AUTO as AUTO
from .directory import RunDirectory as RunDirectory
from .directory import create_directory as create_directory
from .evaluate import Completion as Completion
from .evaluate import Evaluation as Evaluation
from .evaluate import evaluate as evaluate
from .evaluate import generate_text as generate_text
from .examine import Examination as Examination
from .examine import examine as examine
from .load import export_run as export_run
from .load import load_model as load_model
from .numerics import Finding as Finding
from .numerics import check_numerics as check_numerics
from .page import report_page as report_page
from .planned import ConfigPlans as ConfigPlans
from .planned import ReadPlan as ReadPlan
from .planned import plan_config as plan_config
from .report import attention_line as attention_line
from .report import attention_rows as attention_rows
from .run import DryRun as DryRun
from .run import RunResult as RunResult
from .run import dry_run as dry_run
from .run import train as train
from .tune import Timed as Timed
from .tune import Tuning as Tuning
from .tune import Variant as Variant
from .tune import tune as tune
from .tune import variants as variants
from .verify import Verification as Verification
from .verify import tiny as tiny
from .verify import verify as verify
