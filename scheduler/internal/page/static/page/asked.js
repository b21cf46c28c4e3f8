import { ask } from './api.js';

// asked again and again while a view is shown: what the latest answer was, or why
// there is none. changed is called after each.
export function asked(path, every, changed) {
  const now = { answer: undefined, failed: '', stop: () => { clearInterval(timer); } };
  const look = async () => {
    try {
      now.answer = await ask(path);
      now.failed = '';
    } catch (e) {
      now.failed = e.message;
    }
    changed();
  };
  const timer = setInterval(look, every);
  look();
  return now;
}
