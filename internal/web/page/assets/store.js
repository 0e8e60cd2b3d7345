// What the page remembers, in this browser only: conversations, each under a key of its own, and settings.
//
// A conversation is {id, title, changed, messages}. Messages are as the API has them, with what only the page knows under "page".

const PREFIX = "ninfer.conversation.";
const SETTINGS = "ninfer.settings";

const read = (key) => {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
};

// Without storage the page works and forgets.
const write = (key, value) => {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
};

export const create = () => ({ id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, title: "", changed: Date.now(), messages: [] });

export const load = (id) => {
  const found = read(PREFIX + id);
  return Array.isArray(found?.messages) ? found : null;
};

// All conversations, the newest first, without their messages.
export function list() {
  const all = [];
  try {
    for (let i = 0; i < localStorage.length; i++) {
      const key = localStorage.key(i);
      const c = key.startsWith(PREFIX) ? read(key) : null;
      if (c?.id) all.push({ id: c.id, title: c.title, changed: c.changed });
    }
  } catch {
    // No storage.
  }
  return all.sort((a, b) => b.changed - a.changed);
}

// Saves a conversation. When there is no room the oldest others go; false means that it was not saved.
export function save(conversation) {
  if (conversation.messages.length === 0) return true;
  while (!write(PREFIX + conversation.id, conversation)) {
    const oldest = list().findLast((c) => c.id !== conversation.id);
    if (!oldest) return false;
    remove(oldest.id);
  }
  return true;
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // No storage.
  }
}

export const settings = () => ({ theme: "", system: "", effort: "", budget: "", limit: "", temperature: "", topP: "", seed: "", tools: "", key: "", ...read(SETTINGS) });

export const saveSettings = (s) => write(SETTINGS, s);

// Calls back when another tab changes something.
export const watch = (changed) => addEventListener("storage", (e) => (e.key === null || e.key.startsWith("ninfer.")) && changed());
