// Loads an adapter from files of this computer: its folder, or its .safetensors file with adapter_config.json.

import { ApiError, json, send } from "../api.js";
import { button, el, field, openDialog } from "../dom.js";

const WEIGHTS = /\.(safetensors|bin|pt)$/i;

// [{path, file}] of what was dropped; folders are read to two levels.
export async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ path: file.name, file }));
  return (await Promise.all(entries.map((entry) => read(entry, 2)))).flat();
}

async function read(entry, depth) {
  if (entry.isFile) return [{ path: entry.fullPath.replace(/^\//, ""), file: await new Promise((resolve, reject) => entry.file(resolve, reject)) }];
  if (!depth) return [];
  const reader = entry.createReader();
  const children = [];
  for (;;) {
    const more = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!more.length) break;
    children.push(...more);
  }
  return (await Promise.all(children.map((child) => read(child, depth - 1)))).flat();
}

const baseName = (path) => path.split("/").at(-1);

export function isAdapter(files) {
  return files.some(({ path }) => WEIGHTS.test(path) || baseName(path) === "adapter_config.json");
}

// Asks for a name, and sends the files. `onLoaded` gets the name.
export function offerUpload(files, { capabilities, askKey, onLoaded }) {
  if (!capabilities.may_administer) {
    const dialog = openDialog("Load an adapter from files", el("p", {}, capabilities.has_admin_key
      ? "This needs the admin key of the server. Enter it as API key, and try again."
      : "This server was started without an admin key, so nobody may load adapters from files. Start it with --admin-key-file FILE."),
    { buttons: capabilities.has_admin_key ? [button("Enter the key", { class: "primary", onclick: () => {
      dialog.close();
      askKey();
    } })] : [] });
    return;
  }
  if (!capabilities.may_upload) {
    openDialog("Load an adapter from files", el("p", {}, "This server has no folder for adapters. Start it with --local-adapter-root FOLDER, which it may write to."));
    return;
  }
  let chosen = files;
  const folder = files[0]?.path.includes("/") ? files[0].path.split("/")[0] : "";
  const name = el("input", { required: true, maxLength: 96, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", title: "Letters, digits, . _ -", autocomplete: "off", value: folder });
  const list = el("ul", { class: "file-list" });
  const state = el("p", { class: "dim", role: "status" });
  const load = button("Load", { class: "primary", onclick: () => form.requestSubmit() });
  const show = () => {
    list.replaceChildren(...chosen.map(({ path, file }) => el("li", {}, baseName(path), el("span", { class: "dim" }, ` ${(file.size / 1e6).toFixed(2)} MB`))));
    const names = chosen.map(({ path }) => baseName(path));
    const fault = !names.some((each) => WEIGHTS.test(each)) ? "Choose the folder of the adapter, or its .safetensors file."
      : !names.includes("adapter_config.json") ? "adapter_config.json is missing: choose it too. PEFT saves it next to the weights." : "";
    state.textContent = fault;
    load.disabled = Boolean(fault);
  };
  const input = (label, properties) => {
    const chooser = el("input", { type: "file", hidden: true, multiple: true, ...properties, onchange: () => {
      const more = [...chooser.files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));
      const names = new Set(more.map(({ path }) => baseName(path)));
      chosen = [...(properties.webkitdirectory ? [] : chosen.filter(({ path }) => !names.has(baseName(path)))), ...more];
      if (!name.value && more[0]?.path.includes("/")) [name.value] = more[0].path.split("/");
      chooser.value = "";
      show();
    } });
    return [button(label, { onclick: () => chooser.click() }), chooser];
  };
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    load.disabled = true;
    try {
      await upload(name.value, chosen, (text) => (state.textContent = text));
      dialog.close();
      onLoaded(name.value);
    } catch (error) {
      state.textContent = error instanceof ApiError ? `The server refused it: ${error.message}` : "The server does not answer. Try again when it runs.";
      load.disabled = false;
    }
  } }, field("Name of the adapter", name), el("div", { class: "row start" }, input("Choose a folder", { webkitdirectory: true }), input("Choose files", {})), list, state);
  const dialog = openDialog("Load an adapter from files", [el("p", { class: "dim" }, "You can also drop a folder on the conversation."), form], { buttons: [load], close: "Cancel" });
  show();
  name.focus();
}

async function upload(name, files, tell) {
  for (const { path, file } of files) {
    tell(`Sending ${baseName(path)}…`);
    await send(`admin/adapters/files/${encodeURIComponent(name)}/${encodeURIComponent(baseName(path))}`, { method: "POST", content: file });
  }
  tell("The server reads it…");
  const { path } = await json(`admin/adapters/files/${encodeURIComponent(name)}`, { method: "POST" });
  await send("v1/load_lora_adapter", { method: "POST", body: { lora_name: name, lora_path: path, load_inplace: true } });
}
