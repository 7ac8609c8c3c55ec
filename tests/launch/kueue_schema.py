"""Take what k8s-kueue.yaml uses from the published schemas of Kueue.

    python -m tests.launch.kueue_schema FOLDER > tests/launch/kueue_schema.json

FOLDER is config/components/crd/bases of the repository kubernetes-sigs/kueue, of August 2026.
"""

import json
import sys
from pathlib import Path

import yaml

from tests.launch.jobset_schema import prune

KUEUE = Path(__file__).resolve().parents[2] / "launch" / "k8s-kueue.yaml"
SCHEMA = Path(__file__).with_name("kueue_schema.json")
SOURCE = "From kubernetes-sigs/kueue, commit ff69552 (CRDs v1beta2), Apache-2.0"


def main(folder: str) -> None:
    found = {"$comment": SOURCE}
    for value in yaml.safe_load_all(KUEUE.read_text()):
        name = f"kueue.x-k8s.io_{value['kind'].lower()}s.yaml"
        versions = yaml.safe_load(Path(folder, name).read_text())["spec"]["versions"]
        (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1beta2")
        found[value["kind"]] = prune(schema, [value])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
