// Conversations in this browser's IndexedDB. Nothing of them is on the server.

const NAME = "lorikeet";
const TABLE = "conversations";
let opening = null;

function open() {
  opening ||= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function call(mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const request = act(database.transaction(TABLE, mode).objectStore(TABLE));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export const all = async () => (await call("readonly", (table) => table.getAll())).sort((a, b) => b.updated - a.updated);
export const find = (id) => call("readonly", (table) => table.get(id));
export const save = (conversation) => call("readwrite", (table) => table.put(conversation));
export const remove = (id) => call("readwrite", (table) => table.delete(id));
export const clear = () => call("readwrite", (table) => table.clear());

export function download(name, value) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
