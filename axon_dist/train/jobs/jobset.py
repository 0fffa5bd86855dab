"""Writes a job as a Kubernetes JobSet, with one pod per node that uses all of its GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ...core.errors import LaunchError
from ...core.plain_yaml import sections_of
from .job import FINAL, PORT, REQUEUED, RESTARTS, SAVE_SECONDS, Job, commented

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_MANIFEST = """\
# {job.nodes} nodes with {job.gpus} GPUs each, one pod per node that uses all of its GPUs:
#
#   kubectl apply -f FILE
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
  # Kueue starts the job when all of its nodes are free; without Kueue the label has no effect.
  # labels: {{kueue.x-k8s.io/queue-name: QUEUE}}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {job.name}
    # Pods must reach each other before they are ready.
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: {restarts}
    rules:
      # {final}: a mistake in the config or the command; another attempt would fail, too.
      - name: mistake
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
        onJobFailureMessagePatterns: ['.*exit code {final} .*']
      # {interrupted}: a signal ended the run and its state is saved. A node drain is not a failure.
      - name: interrupted
        action: RestartJobSetAndIgnoreMaxRestarts
        onJobFailureReasons: [PodFailurePolicy]
      # {lost} and other codes: a process was lost; the JobSet restarts at most {restarts} times.
      - name: lost
        action: RestartJobSet
        onJobFailureReasons: [BackoffLimitExceeded]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {job.nodes}
          parallelism: {job.nodes}
          # A single pod cannot restart, because the other pods wait for the one that was lost.
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {{containerName: train, operator: In, values: [{final}]}}
              - action: FailJob
                onExitCodes: {{containerName: train, operator: In, values: [{interrupted}]}}
              - action: FailJob
                onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
              - action: Count
                onExitCodes: {{containerName: train, operator: In, values: [{lost}]}}
          template:
            spec:
              restartPolicy: Never
              # After SIGTERM, the run saves at the next step.
              terminationGracePeriodSeconds: {seconds}
              containers:
                - name: train
                  image: {image}
                  command:
{words}
                  env:
                    - name: RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: {index}
                    - {{name: WORLD_SIZE, value: "{job.nodes}"}}
                    - {{name: MASTER_ADDR, value: {first}}}
                    - {{name: MASTER_PORT, value: "{port}"}}
{settings}
                  ports:
                    - containerPort: {port}
                  resources:
                    limits:
                      nvidia.com/gpu: {job.gpus}
                  volumeMounts:
                    - {{name: shared, mountPath: {job.shared}}}
                    # NCCL's buffers are in /dev/shm, which has only 64 MiB by default.
                    - {{name: memory, mountPath: /dev/shm}}
              volumes:
                - name: shared
                  persistentVolumeClaim:
                    claimName: {job.name}-shared
                - name: memory
                  emptyDir: {{medium: Memory}}
"""


def manifest(job: Job) -> str:
    """Returns the manifest for `kubectl apply`.

    A failed pod fails its Job, and the JobSet recreates all pods, because the pods of a run need
    each other. A run ended by a signal is not a failure and does not count against `maxRestarts`.
    """
    interrupted, lost = REQUEUED
    # The host name that JobSet gives to pod 0 of the first replica of the replicated job "node".
    first = f"{job.name}-node-0-0.{job.name}"
    settings = commented(job.settings(), " " * 16, '- {{name: {name}, value: "{value}"}}')
    words = [f"                - {json.dumps(word)}" for word in job.command]
    return _MANIFEST.format(
        job=job,
        first=first,
        image=json.dumps(job.image),
        index=_INDEX,
        final=FINAL,
        interrupted=interrupted,
        lost=lost,
        restarts=RESTARTS,
        port=PORT,
        seconds=SAVE_SECONDS,
        words="\n".join("    " + line for line in words),
        settings="\n".join("    " + line for line in settings),
    )


_SPEC: Mapping[str, object] = {
    "network": {
        "enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool,
    },
    "failurePolicy": {
        "maxRestarts": int, "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
        "rules": [
            {
                "name": str,
                "action": (
                    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts",
                    "RestartJob", "RestartJobAndIgnoreMaxRestarts",
                ),
                "onJobFailureReasons": [
                    (
                        "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes",
                        "MaxFailedIndexesExceeded", "PodFailurePolicy",
                    )
                ],
                "onJobFailureMessagePatterns": [str],
                "targetReplicatedJobs": [str],
            }
        ],
    },
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": dict}}],
}  # fmt: skip
"""The fields of `JobSetSpec` that are used here, with their types and valid values. Source: the
custom resource definition jobset.x-k8s.io/v1alpha2 of kubernetes-sigs/jobset,
config/components/crd."""


def check(text: str) -> str | None:
    """Checks the fields and types of a manifest, and some rules of the API server.

    Returns:
        A description of the check.

    Raises:
        LaunchError: for the first wrong field.
    """
    data = sections_of(text, "the JobSet")
    if (data.get("apiVersion"), data.get("kind")) != ("jobset.x-k8s.io/v1alpha2", "JobSet"):
        raise LaunchError("the manifest is not a JobSet of jobset.x-k8s.io/v1alpha2")
    for problem in _problems(data["spec"], _SPEC, "spec"):
        raise LaunchError(f"the JobSet is wrong: {problem}")
    for job in data["spec"]["replicatedJobs"]:
        template = job["template"]["spec"]
        if template["template"]["spec"]["restartPolicy"] != "Never":
            # The API server accepts a podFailurePolicy only with this restart policy.
            raise LaunchError("a Job with a podFailurePolicy must have restartPolicy: Never")
    return "the fields of jobset.x-k8s.io/v1alpha2"


def _problems(value: object, wanted: object, path: str) -> Iterator[str]:
    if isinstance(wanted, Mapping):
        if not isinstance(value, Mapping):
            yield f"{path} is {value!r:.60} and must be a section"
            return
        for key, inner in value.items():
            if key not in wanted:
                yield f"{path} has no field {key!r}"
            else:
                yield from _problems(inner, wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            yield f"{path} is {value!r:.60} and must be a list"
            return
        for number, inner in enumerate(value):
            yield from _problems(inner, wanted[0], f"{path}[{number}]")
    elif isinstance(wanted, tuple):
        if value not in wanted:
            yield f"{path} is {value!r:.60} and must be one of {', '.join(wanted)}"
    elif isinstance(wanted, type) and type(value) is not wanted:
        yield f"{path} is {value!r:.60} and must be a {wanted.__name__}"
