"""SageMaker: four ml.p4d.24xlarge, one process per host, which takes its eight GPUs: 32 in all.

The image needs axon_dist[cuda] and sagemaker-training, which sets SM_HOSTS and SM_CURRENT_HOST in
every container; the first host by name is the coordinator. Give no `distribution`, for that would
start the launcher of another framework. The role must be allowed to read and write the bucket.

    pip install sagemaker
    python configs/launch/sagemaker.py --role ARN --image URI --run-dir s3://bucket/runs/fsdp
"""

import argparse

from sagemaker.estimator import Estimator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--role", required=True)
parser.add_argument("--image", required=True)
parser.add_argument("--run-dir", required=True)
arguments = parser.parse_args()

Estimator(
    image_uri=arguments.image,
    role=arguments.role,
    instance_type="ml.p4d.24xlarge",
    instance_count=4,
    source_dir="configs",
    entry_point="launch/sagemaker.sh",
    environment={"RUN_DIR": arguments.run_dir},
).fit()
