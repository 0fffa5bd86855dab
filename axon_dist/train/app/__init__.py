"""Implements the commands: run, resume, report, verify, examine, load, evaluate, export.

Read from the top down: `training.py`, `runs.py`, `steps.py`.
"""

from ..config import abstract_batch as abstract_batch
from .config_plans import ConfigPlans as ConfigPlans
from .config_plans import TracedPlan as TracedPlan
from .config_plans import plan_config as plan_config
from .directory import AUTO as AUTO
from .directory import RunDirectory as RunDirectory
from .directory import create_directory as create_directory
from .evaluate import Completion as Completion
from .evaluate import Evaluation as Evaluation
from .evaluate import evaluate as evaluate
from .evaluate import generate_text as generate_text
from .examine import DryRun as DryRun
from .examine import Examination as Examination
from .examine import dry_run as dry_run
from .examine import examine as examine
from .measure import DataCheck as DataCheck
from .measure import Timed as Timed
from .measure import Tuning as Tuning
from .measure import Variant as Variant
from .measure import check_data as check_data
from .measure import tune as tune
from .measure import variants as variants
from .network import AxisSpeed as AxisSpeed
from .network import NetworkCheck as NetworkCheck
from .network import check_network as check_network
from .numerics import Finding as Finding
from .numerics import check_numerics as check_numerics
from .page import report_page as report_page
from .profile import profile_run as profile_run
from .profile import profile_step as profile_step
from .run_model import export_run as export_run
from .run_model import load_model as load_model
from .runs import Run as Run
from .runs import build_loader as build_loader
from .runs import build_run as build_run
from .runs import step_for as step_for
from .steps import build_step as build_step
from .steps import build_world as build_world
from .steps import model_of as model_of
from .summary import attention_line as attention_line
from .summary import attention_rows as attention_rows
from .training import RunResult as RunResult
from .training import train as train
from .verify import Verification as Verification
from .verify import tiny as tiny
from .verify import verify as verify
