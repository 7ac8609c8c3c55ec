"""Take what the files for Kubernetes use from the schema of JobSet, and check a file against it.

    python -m tests.launch.jobset_schema CRD.yaml > tests/launch/jobset_schema.json

CRD.yaml is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of the repository
kubernetes-sigs/jobset, v0.12.0.
"""

import json
import re
import sys
from pathlib import Path

import yaml

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
JOBSET, JOB = LAUNCH / "k8s-jobset.yaml", LAUNCH / "k8s-indexed-job.yaml"
SCHEMA = Path(__file__).with_name("jobset_schema.json")
KEPT = ("type", "enum", "required", "pattern", "x-kubernetes-int-or-string")
SOURCE = "From kubernetes-sigs/jobset v0.12.0 (CRD v1alpha2, with Kubernetes' JobSpec), Apache-2.0"


def errors(value, schema: dict, path: str = "") -> list[str]:
    """What of a file does not fit; an entry that the schema does not name is an error, too."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if schema.get("x-kubernetes-int-or-string"):
        fits = isinstance(value, int | str)
    else:
        kind = schema["type"]
        fits = isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if not fits:
        return [f"{path}: {value!r} is no {schema.get('type', 'number or text')}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} is none of {schema['enum']}")
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        found.append(f"{path}: {value!r} does not fit {schema['pattern']}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += errors(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        found += [f"{path}: no {name}" for name in schema.get("required", ()) if name not in value]
        of_any = schema.get("additionalProperties")
        for name, item in value.items():
            part = schema.get("properties", {}).get(name, of_any)
            if part:
                found += errors(item, part, f"{path}.{name}")
            elif not schema.get("any"):
                why = "unknown" if part is None else f"{SCHEMA.name} must be made anew for"
                found.append(f"{path}: {why} {name!r}")
    return found


def with_job(job: dict) -> dict:
    """A JobSet whose only job is a Job, which the schema of JobSet takes in."""
    inside = [{"name": "job", "replicas": 1, "template": {"spec": job["spec"]}}]
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return {**kind, "metadata": job["metadata"], "spec": {"replicatedJobs": inside}}


def prune(schema: dict, values: list) -> dict:
    """The part of a schema that these values use; of their other entries only the names."""
    kept = {name: schema[name] for name in KEPT if name in schema}
    if "items" in schema:
        kept["items"] = prune(schema["items"], [item for value in values for item in value])
    if "properties" in schema:
        used = {
            name: [value[name] for value in values if name in value]
            for name in schema["properties"]
        }
        kept["properties"] = {
            name: prune(part, used[name]) if used[name] else {}
            for name, part in schema["properties"].items()
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        items = [item for value in values for item in value.values()]
        kept["additionalProperties"] = prune(schema["additionalProperties"], items)
    elif schema.get("type") == "object":
        kept["any"] = True
    return kept


def main(crd: str) -> None:
    versions = yaml.safe_load(Path(crd).read_text())["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1alpha2")
    jobset, job = (yaml.safe_load(path.read_text()) for path in (JOBSET, JOB))
    pruned = prune(schema, [jobset, with_job(job)])
    print(json.dumps({"$comment": SOURCE, **pruned}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
