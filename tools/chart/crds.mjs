// Checks custom resources against the types of their own projects, and refuses fields that no type has.
//
//   node crds.mjs NODE_MODULES < manifests.json     prints a JSON list of complaints
//
// The packages' validators ignore unknown fields, as an API server without strict validation does. They do read every
// field that they know, so a field of the manifest that was never read is one that the resource does not have.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

/** `value` as a proxy that notes in `unread` every field until it is read. */
function watched(value, path, unread) {
  if (value === null || typeof value !== "object") return value;
  const children = {};
  for (const [key, child] of Object.entries(value)) {
    children[key] = watched(child, `${path}.${key}`, unread);
    if (!Array.isArray(value)) unread.add(`${path}.${key}`);
  }
  return new Proxy(value, {
    get(target, key) {
      unread.delete(`${path}.${String(key)}`);
      return Object.hasOwn(target, key) ? (children[key] ?? target[key]) : target[key];
    },
    ownKeys(target) {
      // A map: its keys are free.
      for (const key of Object.keys(target)) unread.delete(`${path}.${key}`);
      return Reflect.ownKeys(target);
    },
  });
}

async function complaints(modules, manifest) {
  const [group, version] = manifest.apiVersion.split("/");
  const folder = PACKAGES[group];
  const name = `${manifest.kind} ${manifest.metadata.name}`;
  if (folder === undefined) return [`${name}: no types of ${manifest.apiVersion} are known`];
  const path = join(modules, "@kubernetes-models", folder, group, version, `${manifest.kind}.js`);
  const Model = (await import(pathToFileURL(path)))[manifest.kind];
  const unread = new Set();
  try {
    // The constructor copies, and so reads, all that it is given.
    const model = new Model(manifest);
    model.spec = watched(manifest.spec, "spec", unread);
    model.validate();
  } catch (error) {
    return [`${name}: ${error.message}`];
  }
  return [...unread].map((field) => `${name}: ${field} is no field of ${manifest.apiVersion}`);
}

const manifests = JSON.parse(readFileSync(0, "utf8"));
const found = await Promise.all(manifests.map((manifest) => complaints(process.argv[2], manifest)));
console.log(JSON.stringify(found.flat()));
