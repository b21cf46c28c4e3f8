// Numbers, times and units as people read them.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });

export const number = (n) => whole.format(n);
export const compact = (n) => (Math.abs(n) < 10000 ? whole.format(n) : short.format(n));

// percent of a share from 0 to 1; '–' where there is none.
export function percent(share, digits = 0) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : '–';
}

// percentOf never says 100 % or 0 % of what is not all or nothing.
export function percentOf(part, of) {
  if (!of) return '–';
  if (part === 0 || part === of) return part ? '100 %' : '0 %';
  const share = part / of;
  if (part > 0 && share < 0.001) return '< 0.1 %';
  if (part < of && share > 0.999) return '> 99.9 %';
  return percent(share, share > 0.1 && share < 0.9 ? 0 : 1);
}

// span of milliseconds in the unit that fits.
export function span(ms) {
  if (!Number.isFinite(ms)) return '–';
  const size = Math.abs(ms);
  if (size < 10) return `${ms.toFixed(1)} ms`;
  if (size < 1000) return `${ms.toFixed(0)} ms`;
  if (size < 10e3) return `${(ms / 1e3).toFixed(1)} s`;
  if (size < 120e3) return `${(ms / 1e3).toFixed(0)} s`;
  if (size < 7200e3) return `${(ms / 60e3).toFixed(0)} min`;
  if (size < 172800e3) return `${(ms / 3600e3).toFixed(1)} h`;
  return `${(ms / 86400e3).toFixed(0)} d`;
}

// clock time of a moment in Unix milliseconds; the day, too, where it is not today's.
export function clock(at) {
  const moment = new Date(at);
  const time = moment.toLocaleTimeString('en-GB');
  return moment.toDateString() === new Date().toDateString() ? time : `${moment.toLocaleDateString('en-CA')} ${time}`;
}

export function plural(n, one, many = `${one}s`) {
  return `${number(n)} ${n === 1 ? one : many}`;
}
